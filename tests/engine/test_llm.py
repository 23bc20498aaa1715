import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import lmdb
import pytest
import torch
import transformers

from engine import SamplingParams
from engine.config import IGNORED_ARGUMENTS, EngineConfig
from kvstore.errors import ConfigError, StoreClosedError
from kvstore.reports.events import BlockStored
from kvstore.testing import FaultyDisk

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
BLOCK = 2 * 2 * 16 * 2 * 16 * 4  # bytes of one block of the tiny model


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def cached(output):
    return output.metrics.cached_tokens


@pytest.mark.parametrize(
    ("device_blocks", "host_blocks", "has_disk"),
    [(32, 0, False), (32, 20, False), (32, 0, True), (32, 6, True), (400, 0, True)],
)
def test_tiny_tiers_that_move_blocks_all_the_time_change_no_token(
    make_llm, tiny_prompts, tiny_oracle, tmp_path, device_blocks, host_blocks, has_disk
):
    llm = make_llm(
        device_cache=device_blocks * BLOCK,
        host_cache=host_blocks * BLOCK,
        disk_cache=tmp_path / "cache" if has_disk else None,
        max_num_batched_tokens=64,
    )
    for _ in range(2):
        outputs = llm.generate(tiny_prompts, GREEDY)
        for prompt, output in zip(tiny_prompts, outputs, strict=True):
            tiny_oracle.assert_equal(prompt, output.outputs[0].token_ids)
        assert llm.check() == []
    stats = llm.stats()
    assert sum(output.num_cached_tokens for output in outputs) > 0
    if device_blocks == 32:
        assert stats.tiers["device"].evicted_blocks > 0
    if host_blocks:
        assert stats.demoted_blocks > 0
        assert stats.promoted_blocks["host"] > 0


def test_counts_add_up_and_name_the_tier(make_llm, tiny_prompts, tmp_path):
    llm = make_llm(host_cache=0, disk_cache=tmp_path / "cache")
    prompt = tiny_prompts[0][:70]
    (cold,) = llm.generate([prompt], GREEDY)
    (warm,) = llm.generate([prompt], GREEDY)
    llm.reset_prefix_cache("device")
    (disk,) = llm.generate([prompt], GREEDY)
    assert cached(cold) == {"device": 0, "host": 0, "disk": 0, "remote": 0}
    assert cached(warm) == {"device": 64, "host": 0, "disk": 0, "remote": 0}
    assert cached(disk) == {"device": 0, "host": 0, "disk": 64, "remote": 0}
    for output in (cold, warm, disk):
        metrics = output.metrics
        assert metrics.computed_tokens + output.num_cached_tokens == len(prompt)
        assert 0 < metrics.ttft_s <= metrics.total_s
        assert metrics.queue_s + metrics.promote_s <= metrics.ttft_s
    assert disk.metrics.promote_s > 0
    assert tokens([cold]) == tokens([warm]) == tokens([disk])


def test_an_aligned_prompt_that_is_cached_whole_still_computes_its_end(make_llm, tiny_prompts):
    llm = make_llm()
    prompt = tiny_prompts[0][:32]
    (cold,) = llm.generate([prompt], GREEDY)
    (warm,) = llm.generate([prompt], GREEDY)
    assert warm.metrics.computed_tokens >= 1
    assert tokens([cold]) == tokens([warm])


def test_blocks_made_while_decoding_are_cached(make_llm, tiny_prompts):
    llm = make_llm()
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    (first,) = llm.generate([tiny_prompts[0]], long)
    whole = tiny_prompts[0] + first.outputs[0].token_ids
    (second,) = llm.generate([[*whole, 5]], GREEDY)
    assert second.num_cached_tokens == (len(whole) - 1) // 16 * 16


def test_caching_off_finds_nothing_and_answers_the_same(make_llm, tiny_prompts, tiny_oracle):
    llm = make_llm(enable_prefix_caching=False)
    for _ in range(2):
        outputs = llm.generate(tiny_prompts[:4], GREEDY)
        assert [output.num_cached_tokens for output in outputs] == [0] * 4
        for prompt, output in zip(tiny_prompts, outputs, strict=False):
            tiny_oracle.assert_equal(prompt, output.outputs[0].token_ids)
    assert llm.stats().tiers["device"].used_blocks == 0


def test_prompts_of_one_batch_compute_a_common_prefix_once(make_llm, tiny_prompts):
    llm = make_llm()
    document = tiny_prompts[0][:64]
    outputs = llm.generate([[*document, token] for token in range(10, 16)], GREEDY)
    computed = sum(output.metrics.computed_tokens for output in outputs)
    assert computed == 64 + 6


def test_salts_do_not_share(make_llm, tiny_prompts):
    llm = make_llm()
    prompt = tiny_prompts[0][:70]
    llm.generate([prompt], GREEDY, cache_salt="a")
    (other,) = llm.generate([prompt], GREEDY, cache_salt="b")
    (same,) = llm.generate([prompt], GREEDY, cache_salt="a")
    assert (other.num_cached_tokens, same.num_cached_tokens) == (0, 64)


def test_a_prompt_of_higher_priority_outlives_later_ones(make_llm, tiny_prompts):
    llm = make_llm(device_cache=32 * BLOCK)
    important, ordinary = tiny_prompts[0][:70], tiny_prompts[2][:70]
    llm.generate([important], GREEDY, cache_priority=1)
    llm.generate([ordinary], GREEDY)
    llm.generate([[5 + number] * 200 for number in range(3)], GREEDY)
    (kept,) = llm.generate([important], GREEDY)
    (lost,) = llm.generate([ordinary], GREEDY)
    assert (kept.num_cached_tokens, lost.num_cached_tokens) == (64, 0)


@pytest.mark.parametrize("deadline_s", [0.0, 0.02])
def test_a_request_computes_what_disk_does_not_bring_in_time(
    make_llm, tiny_prompts, tmp_path, deadline_s
):
    first = make_llm(disk_cache=tmp_path / "cache")
    (cold,) = first.generate([tiny_prompts[0]], GREEDY)
    first.close()
    second = make_llm(
        disk_cache=tmp_path / "cache", store_config={"promote_deadline_s": deadline_s}
    )
    transfer = second._core.store._transfer
    transfer._disk = disk = FaultyDisk(transfer._disk)
    disk.is_held = True
    (late,) = second.generate([tiny_prompts[0]], GREEDY)
    assert cached(late)["disk"] == 0
    assert tokens([late]) == tokens([cold])
    disk.is_held = False


def test_a_seed_gives_the_same_sample_whatever_else_runs(make_llm, tiny_prompts):
    llm = make_llm()
    seeded = SamplingParams(temperature=1.0, seed=7, max_tokens=12)
    (alone,) = llm.generate([tiny_prompts[3]], seeded)
    noisy = SamplingParams(temperature=1.0, max_tokens=20)
    together = llm.generate([*tiny_prompts[:3], tiny_prompts[3]], [noisy, noisy, noisy, seeded])
    assert tokens([alone]) == tokens(together[3:])


def test_samples_without_a_seed_of_their_own_are_drawn_apart(make_llm, tiny_prompts):
    """Sample 1 of a request once had the seed of sample 0 of the next one."""
    llm = make_llm()
    drawn = SamplingParams(n=3, temperature=1.0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([tiny_prompts[0]] * 3, drawn)
    samples = [tuple(sample.token_ids) for output in outputs for sample in output.outputs]
    assert len(set(samples)) == 9


def test_n_samples_count_the_prompt_once_and_differ(make_llm, tiny_prompts):
    llm = make_llm()
    prompt = tiny_prompts[0][:40]
    (output,) = llm.generate([prompt], SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=12))
    assert [sample.index for sample in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(sample.token_ids) for sample in output.outputs}) > 1
    assert output.metrics.computed_tokens + output.num_cached_tokens == 40


def test_a_new_process_finds_the_blocks_on_disk(make_llm, tiny_model, tiny_prompts, tmp_path):
    first = make_llm(disk_cache=tmp_path / "cache")
    (cold,) = first.generate([tiny_prompts[0]], GREEDY)
    first.close()
    answer = run_in_process(tiny_model, tiny_prompts[0], tmp_path / "cache")
    assert answer["tokens"] == cold.outputs[0].token_ids
    # All but the last token: the block that prompt and answer share gives its head.
    assert answer["disk"] == len(tiny_prompts[0]) - 1


def test_an_engine_that_nobody_closed_writes_its_blocks_at_exit(make_llm, tiny_model, tmp_path):
    """Nor one that nobody had any more, as it was made in a function that has returned."""
    code = (
        "import sys; from engine import LLM; engines = [LLM(sys.argv[1], dtype='float32',"
        "skip_tokenizer_init=True, device_cache='16MiB', disk_cache=f'{sys.argv[2]}/{name}',"
        "store_config={'dirty_max_age_s': 1000.0}) for name in ('kept', 'dropped')];"
        "[llm.generate([[5] * 40]) for llm in engines]; del engines[1]"
    )
    child = subprocess.run(
        [sys.executable, "-c", code, tiny_model, str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert child.stderr == ""
    for name in ("kept", "dropped"):
        llm = make_llm(disk_cache=tmp_path / "cache" / name)
        assert llm.stats().tiers["disk"].used_blocks >= 2, name


def test_a_killed_process_loses_only_what_is_younger_than_the_dirty_age(
    make_llm, tiny_model, tiny_prompts, tmp_path
):
    """kill -9 once age has had the answer written; nothing was flushed or closed."""
    arguments = [tiny_model, json.dumps(tiny_prompts[0]), str(tmp_path / "cache"), "wait"]
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        said = child.stdout.readline()
        child.send_signal(signal.SIGKILL)
    assert said == "answered and waited\n"
    llm = make_llm(disk_cache=tmp_path / "cache")
    (output,) = llm.generate([tiny_prompts[0]], GREEDY)
    assert cached(output)["disk"] == len(tiny_prompts[0]) - 1


def test_changed_weights_or_dtype_only_miss(make_llm, tiny_model, tiny_prompts, tmp_path):
    first = make_llm(disk_cache=tmp_path / "cache")
    first.generate([tiny_prompts[0]], GREEDY)
    first.close()
    network = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        network.model.layers[1].self_attn.v_proj.weight.mul_(1.01)
    network.save_pretrained(tmp_path / "changed")
    changed = make_llm(str(tmp_path / "changed"), disk_cache=tmp_path / "cache")
    assert changed.generate([tiny_prompts[0]], GREEDY)[0].num_cached_tokens == 0
    changed.close()
    half = make_llm(disk_cache=tmp_path / "cache", dtype="float16")
    assert half.generate([tiny_prompts[0]], GREEDY)[0].num_cached_tokens == 0
    half.close()
    again = make_llm(disk_cache=tmp_path / "cache")
    assert again.generate([tiny_prompts[0]], GREEDY)[0].num_cached_tokens > 0


def test_a_flipped_byte_on_disk_is_a_miss_and_heals(make_llm, tiny_prompts, tiny_oracle, tmp_path):
    prompt, directory = tiny_prompts[0][:70], tmp_path / "cache"
    first = make_llm(disk_cache=directory)
    first.generate([prompt], GREEDY)
    first.close()
    flip_payload_byte(directory, block_number=2)
    second = make_llm(disk_cache=directory)
    (output,) = second.generate([prompt], GREEDY)
    tiny_oracle.assert_equal(prompt, output.outputs[0].token_ids)
    assert cached(output)["disk"] == 32
    assert sum(second.stats().failed_loads.values()) == 1
    second.close()
    third = make_llm(disk_cache=directory)
    (output,) = third.generate([prompt], GREEDY)
    assert cached(output)["disk"] == 64


def test_a_reset_of_a_memory_tier_loses_nothing(make_llm, tiny_prompts, tmp_path):
    llm = make_llm(disk_cache=tmp_path / "cache", store_config={"dirty_max_age_s": 1000.0})
    llm.generate([tiny_prompts[0]], GREEDY)
    assert llm.reset_prefix_cache("device") == 0
    (output,) = llm.generate([tiny_prompts[0]], GREEDY)
    assert cached(output)["disk"] == len(tiny_prompts[0]) - 1


def test_a_reset_of_everything_forgets_everything(make_llm, tiny_prompts, tmp_path):
    llm = make_llm(disk_cache=tmp_path / "cache", host_cache=20 * BLOCK)
    llm.generate([tiny_prompts[0]], GREEDY)
    llm.flush()
    assert llm.reset_prefix_cache() == 0
    (output,) = llm.generate([tiny_prompts[0]], GREEDY)
    assert output.num_cached_tokens == 0


def test_a_reset_waits_for_what_is_just_being_copied(make_llm, monkeypatch):
    """The next victims of a device that is nearly full go to host ahead of need: blocks on their
    way there counted as in use, and stayed."""
    llm = make_llm(device_cache=32 * BLOCK, host_cache=40 * BLOCK)
    core, may_end = llm._core, threading.Event()
    copier = core.store._transfer._copier
    copy_out = copier.copy_out

    async def wait_then_copy(*arguments):
        while not may_end.is_set():  # noqa: ASYNC110 - set from another thread
            await asyncio.sleep(0.001)
        await copy_out(*arguments)

    monkeypatch.setattr(copier, "copy_out", wait_then_copy)
    llm.generate([[5] * 470], GREEDY)
    assert core.wait_for(lambda: core.store.num_pending > 0, 60)
    with ThreadPoolExecutor(1) as pool:
        skipped = pool.submit(llm.reset_prefix_cache, "device")
        core.wait_for(lambda: skipped.done() or len(core._awaited) > 1, 60)
        may_end.set()
        assert skipped.result(60) == 0
    assert llm.stats().tiers["device"].used_blocks == 0


def test_metrics_and_events_tell_what_happened(make_llm, tiny_prompts):
    llm, events = make_llm(), []
    unsubscribe = llm.subscribe(events.extend)
    llm.generate([tiny_prompts[0]], GREEDY)
    llm._core.wait_for(lambda: True)  # a turn of the step thread: it hands over what is pending
    batches = [event.block_hashes for event in events if isinstance(event, BlockStored)]
    stored = {key for batch in batches for key in batch}
    assert len(stored) == llm.stats().tiers["device"].used_blocks > 0
    unsubscribe()
    assert 'kvstore_used_bytes{tier="device"}' in llm.metrics_text()


def test_the_cache_is_written_while_nobody_calls(make_llm, tiny_prompts, tmp_path):
    llm = make_llm(disk_cache=tmp_path / "cache", store_config={"dirty_max_age_s": 0.05})
    llm.generate([tiny_prompts[0]], GREEDY)
    assert llm._core.wait_for(lambda: llm._core.store.is_clean, timeout=60)
    assert llm.stats().tiers["disk"].used_blocks > 0


def test_methods_may_be_called_from_any_thread(make_llm, tiny_prompts, tiny_oracle):
    llm = make_llm(max_num_batched_tokens=64)
    answers: dict[int, list[int]] = {}

    def ask(i):
        (output,) = llm.generate([tiny_prompts[i]], GREEDY, use_tqdm=False)
        answers[i] = output.outputs[0].token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, answer in answers.items():
        tiny_oracle.assert_equal(tiny_prompts[i], answer)
    assert len(answers) == 6


def test_an_interrupted_call_aborts_its_requests(make_llm, tiny_prompts, monkeypatch):
    llm = make_llm()

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("engine.llm.as_completed", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(tiny_prompts, SamplingParams(max_tokens=200, ignore_eos=True))
    monkeypatch.undo()
    assert llm._core.call(lambda: llm._core.scheduler.has_work) is False
    assert llm.check() == []
    assert llm.generate([tiny_prompts[0]], GREEDY)[0].finished


def test_a_step_that_fails_ends_its_requests_and_not_the_engine(
    make_llm, tiny_prompts, monkeypatch
):
    llm = make_llm()

    def fail(steps):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(llm._core.runner, "execute", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        llm.generate(tiny_prompts[:2], GREEDY)
    monkeypatch.undo()
    assert llm.check() == []
    assert llm.generate([tiny_prompts[0]], GREEDY)[0].finished


def test_max_tokens_and_the_context_end_an_answer(make_llm):
    llm = make_llm(max_model_len=64)
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    (output,) = llm.generate([[5] * 50], params)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (14, "length")
    with pytest.raises(ConfigError, match=r"has 70 tokens .* takes 63 .* cut 7"):
        llm.generate([[5] * 70], params)


def test_stop_tokens_end_an_answer(make_llm, tiny_prompts):
    llm = make_llm()
    (free,) = llm.generate([tiny_prompts[0]], GREEDY)
    stop = free.outputs[0].token_ids[3]
    at = free.outputs[0].token_ids.index(stop)
    params = SamplingParams(temperature=0.0, max_tokens=16, stop_token_ids=[stop])
    (stopped,) = llm.generate([tiny_prompts[0]], params)
    assert stopped.outputs[0].token_ids == free.outputs[0].token_ids[: at + 1]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device_cache": "1KiB"}, "device_cache: .* at least .*MiB"),
        ({"host_cache": 100}, "host_cache: 100 bytes hold no block"),
        ({"disk_cache_size": "huge"}, "disk_cache_size: expected bytes"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"block_size": 12}, "block_size"),
        ({"blocksize": 16}, r"unknown blocksize; did you mean block_size\?$"),
        ({"kv_offloading_size": 4.0}, "kv_offloading_size: .*set host_cache or disk_cache"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: only 1"),
        ({"store_config": {"dirty": 1}}, "store_config: unknown dirty"),
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens: expected at least max_num_seqs"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(make_llm, settings, message):
    with pytest.raises(ConfigError, match=message) as raised:
        make_llm(**settings)
    assert "\n" not in str(raised.value)


def test_arguments_of_vllm_without_meaning_here_are_accepted(make_llm):
    make_llm(tensor_parallel_size=1, swap_space=4)


@pytest.mark.parametrize(
    "prompts",
    [[[]], [[200]], [[-1]], [{"text": "a"}], ["text"], [[1.5]], [[1, None]], b"bytes", None, 5],
    ids=str,
)
def test_a_prompt_that_cannot_be_computed_is_refused(make_llm, prompts):
    llm = make_llm()
    with pytest.raises(ConfigError):
        llm.generate(prompts)
    assert llm.check() == []


@pytest.mark.parametrize("params", [{"max_tokens": 8}, "greedy", 8, [None]], ids=str)
def test_sampling_params_of_another_type_are_refused(make_llm, params):
    llm = make_llm()
    for ask in (llm.generate, llm.start):
        with pytest.raises(ConfigError, match="sampling_params: expected SamplingParams"):
            ask([5, 6], params)


@pytest.mark.parametrize(
    "cache",
    [
        {"cache_salt": "\ud800"},
        {"cache_salt": b"x"},
        {"cache_salt": 5},
        {"cache_priority": "high"},
        {"cache_priority": 1, "cache_priority_ttl_s": "long"},
        {"cache_priority": 1, "cache_priority_ttl_s": float("nan")},
        {"cache_priority": 1, "cache_priority_ttl_s": 10**400},
    ],
    ids=str,
)
def test_a_wrong_cache_option_is_refused_in_the_callers_thread(make_llm, cache):
    """It used to end the step thread, and every caller waited for ever."""
    llm = make_llm()
    with pytest.raises(ConfigError, match="cache_"):
        llm.generate([[5, 6]], **cache)
    assert llm.generate([[5, 6]], GREEDY)[0].finished


def test_a_salt_may_come_with_its_prompt(make_llm, tiny_prompts):
    llm = make_llm()
    salted = [{"prompt_token_ids": tiny_prompts[0], "cache_salt": salt} for salt in "ab"]
    assert [each.num_cached_tokens for each in llm.generate(salted, GREEDY)] == [0, 0]
    (again,) = llm.generate([tiny_prompts[0]], GREEDY, cache_salt="b")
    assert again.num_cached_tokens > 0
    assert llm.explain(salted[0]).cause is llm.explain(tiny_prompts[0], cache_salt="b").cause
    assert llm.generate(salted[0], GREEDY, cache_salt="a")[0].num_cached_tokens > 0
    for ask in (llm.generate, llm.start, llm.explain):
        with pytest.raises(ConfigError, match="cache_salt: the prompt has one and the call has"):
            ask(salted[0], cache_salt="b")
    with pytest.raises(ConfigError, match="cache_salt: expected text, got 5"):
        llm.generate({"prompt_token_ids": [5], "cache_salt": 5})


def test_arguments_of_vllm_without_meaning_here_are_accepted_at_their_neutral_value():
    neutral = {name: (accepted or ("any",))[0] for name, accepted in IGNORED_ARGUMENTS.items()}
    assert EngineConfig.of(**neutral) == EngineConfig()


def test_an_adapter_is_refused_and_none_is_none(make_llm):
    llm = make_llm()
    assert llm.generate([[5, 6]], GREEDY, lora_request=None)[0].finished
    with pytest.raises(ConfigError, match="lora_request: this engine has no adapters"):
        llm.generate([[5, 6]], GREEDY, lora_request="adapter")


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_num_waiting": True},
        {"max_total_tokens": False},
        {"max_num_seqs": None},
        {"max_model_len": 64.0},
        {"seed": True},
        {"gpu_memory_utilization": True},
        {"enforce_eager": 1},
        {"deterministic": "no"},
        {"store_config": {"min_hits": True}},
        {"store_config": {"dirty_max_age_s": True}},
    ],
    ids=str,
)
def test_a_setting_of_another_kind_is_refused_by_name(wrong):
    (name, value), *_ = (wrong.get("store_config") or wrong).items()
    with pytest.raises(ConfigError, match=rf"^{name}: expected [\w ]+, got {value!r}"):
        EngineConfig(**wrong)


def test_a_failure_of_the_step_thread_leaves_nobody_waiting(make_llm, monkeypatch):
    llm = make_llm()

    def fail():
        raise RuntimeError("a bug")

    monkeypatch.setattr(llm._core.scheduler, "schedule", fail)
    with pytest.raises(StoreClosedError, match="a bug"):
        llm.generate([[5, 6]], GREEDY)
    with pytest.raises(StoreClosedError, match="a bug"):
        llm.stats()
    llm.close()
    assert not llm._core._thread.is_alive()


def test_a_command_that_races_close_is_answered(make_llm):
    """Posted after the last look at the queue, it used to be lost with its caller waiting."""
    llm = make_llm()
    core, late = llm._core, []

    class Queue(type(core._commands)):
        def __bool__(self):
            if core._closing and not late:  # between the look at the queue and the end
                late.append(Future())
                self.append((lambda: late[0].set_exception(StoreClosedError("ran")), late[0]))
                return False
            return len(self) > 0

    core._commands = Queue()
    llm.close()
    with pytest.raises(StoreClosedError):
        late[0].result(timeout=60)


def test_a_condition_that_was_waited_for_in_vain_is_forgotten(make_llm):
    core, looks = make_llm()._core, []
    assert not core.wait_for(lambda: bool(looks.append(1)), timeout=0)
    assert core.wait_for(lambda: True)  # a turn of the step thread, which forgets it
    num_looks = len(looks)
    assert core.wait_for(lambda: True)
    assert len(looks) == num_looks
    assert core._awaited == []


def test_a_forked_child_is_refused_and_may_exit(make_llm, tiny_prompts):
    llm = make_llm()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            llm.generate([tiny_prompts[0]], GREEDY)
            said = b"answered"
        except StoreClosedError as error:
            said = str(error).encode()
        llm.close()
        os.write(writer, said)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read()
        assert b"belongs to the process that made it" in told
        assert b'"spawn"' in told
    assert os.waitpid(child, 0)[1] == 0
    assert llm.generate([tiny_prompts[0]], GREEDY)[0].finished


def test_a_closed_engine_says_so(make_llm):
    llm = make_llm()
    llm.close()
    llm.close()
    with pytest.raises(StoreClosedError):
        llm.generate([[5, 6]])
    with pytest.raises(StoreClosedError):
        llm.stats()


CHILD = """
import json, sys, time
from engine import LLM, SamplingParams
model, prompt, directory, *wait = sys.argv[1:]
llm = LLM(model, dtype="float32", disk_cache=directory, skip_tokenizer_init=True,
          device_cache="16MiB", load_policy="always")
(output,) = llm.generate([json.loads(prompt)], SamplingParams(temperature=0.0, max_tokens=16))
if wait:
    assert llm._core.wait_for(lambda: llm._core.store.is_clean, 60)  # by age: nobody flushes
    print("answered and waited", flush=True)
    time.sleep(60)
print(json.dumps({"tokens": output.outputs[0].token_ids} | output.metrics.cached_tokens))
llm.close()
"""


def run_in_process(model: str, prompt: list[int], directory: Path) -> dict:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, model, json.dumps(prompt), str(directory)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    answer: dict = json.loads(child.stdout)
    return answer


def flip_payload_byte(directory: Path, block_number: int) -> None:
    """Change one byte of the given block's payload, past the store and its checksums."""
    data = bytearray((directory / "data.mdb").read_bytes())
    env = lmdb.open(str(directory), max_dbs=16, readonly=True, lock=False)
    with env.begin() as txn:
        payloads = env.open_db(b"payload", txn, create=False)
        values = [bytes(value) for _, value in txn.cursor(payloads)]
    env.close()
    found = sorted(data.find(value[:256]) for value in values)
    data[found[block_number] + 100] ^= 0x10
    (directory / "data.mdb").write_bytes(data)
