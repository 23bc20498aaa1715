"""Why a prompt would be found in the caches of a running engine, or not (``kvstore.why``)."""

import contextlib
from collections.abc import Sequence
from typing import Any

from engine.core import EngineCore
from engine.model.loader import LoadedModel
from kvstore.block import TierName
from kvstore.disk.offline.browse import Browser
from kvstore.disk.slices import reading
from kvstore.errors import KVStoreError
from kvstore.hashing import encode_tokens
from kvstore.why.explain import explain
from kvstore.why.explanation import Asked, Explanation


def explain_prompt(
    core: EngineCore,
    loaded: LoadedModel,
    disk_cache: Any,
    token_ids: Sequence[int],
    salt: str,
) -> Explanation:
    """Of a prompt as it would be looked up now. Changes nothing, counts nothing.

    ``disk_cache`` is the directory, None where there is none. Waits for a probe of the disk.
    """
    store, tokens = core.store, encode_tokens(token_ids)
    lookup = core.call(lambda: store.lookup(tokens, salt, peek=True))
    core.wait_for(lambda: lookup.is_ready)
    decision = core.call(lambda: store.weigh(lookup))
    siblings = core.call(lambda: store.continuations(lookup))
    is_whole = len(lookup.sources) == len(lookup.keys)
    other_salts = [] if is_whole else core.call(lambda: store.under_other_salts(lookup))
    size = store.layout.block_size
    asked = Asked(
        token_ids=token_ids,
        identity=loaded.identity,
        model=loaded.name,
        salt=salt,
        num_known=len(lookup.sources),
        siblings=siblings,
        other_salts=other_salts,
    )
    tiers = {tier.value: size * lookup.sources.count(tier) for tier in TierName}
    decode = None
    if loaded.tokenizer is not None:
        decode = _decoder(loaded.tokenizer)
    with contextlib.ExitStack() as stack:
        env = None
        if disk_cache is not None and core.call(store.stats).tiers["disk"].state != "off":
            with contextlib.suppress(KVStoreError):  # it is being checked, or has gone
                env = stack.enter_context(reading(disk_cache))
        return explain(
            Browser(env, remembers=False), asked, decode=decode, decision=decision, tiers=tiers
        )


def _decoder(tokenizer: Any) -> Any:
    return lambda ids: str(
        tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )
