"""The nine steps of RadixAttention's figure, on a block store.

Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs" (2024), figure 3:
two chats, a batch of few-shot questions and self-consistency sampling share a radix tree, which an
LRU policy keeps within its memory. Here each run of text is a whole number of blocks. After each
step it is checked what is cached, what is shared and what was evicted.
"""

import itertools

END = [0]  # computed, never cached: a request's last token

_numbers = itertools.count(1)


def text(num_blocks: int) -> list[int]:
    """A run of tokens that nothing else begins with."""
    return [token for _ in range(num_blocks) for token in [next(_numbers)] * 4]


SYSTEM = text(2)
FIRST_HELLO, FIRST_TURN, FIRST_LATER = text(1), text(2), text(6)
SECOND_HELLO, SECOND_TURN = text(2), text(3)
EXAMPLES = text(2)
QUESTIONS = [text(1) for _ in range(3)]
ANSWERS = [text(1) for _ in range(2)]


def test_the_nine_steps_of_the_radix_attention_figure(make_engine):
    engine = make_engine(15)
    store = engine.store

    def ask(*parts: list[int]) -> int:
        """Serve a request; returns how many blocks it did not compute."""
        return len(engine.run([*itertools.chain(*parts), *END]).sources)

    def cached(*parts: list[int]) -> int:
        return len(engine.look_up([*itertools.chain(*parts), *END], peek=True).sources)

    def resident() -> int:
        return store.device.capacity - store.device.num_free

    # 1: nothing is cached. Other requests hold six blocks, which tightens the memory until step 6.
    ballast = engine.start(text(6))
    assert cached(SYSTEM) == 0

    # 2: the first chat's first message.
    assert ask(SYSTEM, FIRST_HELLO) == 0
    assert cached(SYSTEM, FIRST_HELLO) == 3

    # 3: its second turn reuses the first.
    assert ask(SYSTEM, FIRST_HELLO, FIRST_TURN) == 3

    # 4: a second chat shares the system prompt and nothing else.
    assert ask(SYSTEM, SECOND_HELLO) == 2
    assert resident() - 6 == 7

    # 5: it goes on, and the first chat's second turn, least recently used, makes room.
    assert ask(SYSTEM, SECOND_HELLO, SECOND_TURN) == 4
    assert cached(SYSTEM, FIRST_HELLO, FIRST_TURN) == 3
    assert cached(SYSTEM, SECOND_HELLO, SECOND_TURN) == 7
    assert resident() - 6 == 8

    # 6: a few-shot question shares nothing with the chats.
    store.release(ballast)
    assert ask(EXAMPLES, QUESTIONS[0]) == 0
    assert resident() == 11

    # 7: a batch of more of them shares the examples.
    batch = [[*EXAMPLES, *question, *END] for question in QUESTIONS[1:]]
    leases = [engine.start(prompt) for prompt in batch]
    assert [lease.num_cached for lease in leases] == [2, 2]
    assert leases[0].block_ids[:2] == leases[1].block_ids[:2]
    for lease, prompt in zip(leases, batch, strict=True):
        engine.compute(lease, prompt)
        store.release(lease)
    assert resident() == 13

    # 8: the first chat goes on. The second chat is evicted, its shared system prompt is not.
    assert ask(SYSTEM, FIRST_HELLO, FIRST_LATER) == 3
    assert cached(SYSTEM, SECOND_HELLO, SECOND_TURN) == 2
    assert cached(SYSTEM, FIRST_HELLO, FIRST_LATER) == 9
    assert all(cached(EXAMPLES, question) == 3 for question in QUESTIONS)

    # 9: more answers to the first few-shot question. They share examples and question; the other
    # two questions go.
    for answer in ANSWERS:
        assert ask(EXAMPLES, QUESTIONS[0], answer) == 3
    assert all(cached(EXAMPLES, QUESTIONS[0], answer) == 4 for answer in ANSWERS)
    assert [cached(EXAMPLES, question) for question in QUESTIONS] == [3, 2, 2]
    assert cached(SYSTEM, FIRST_HELLO, FIRST_LATER) == 9
    assert store.check() == []
