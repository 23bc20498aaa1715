import gzip
import io
import json
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import ConfigError, TraceError
from kvstore.planning import read_trace
from kvstore.planning import request_batch as batches_module
from kvstore.reports.event_file import EventFile
from kvstore.reports.events import BlockRemoved, RequestMatched


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def matched(keys: list[bytes], num_tokens: int, ts: float, block_size: int = 16) -> RequestMatched:
    return RequestMatched(
        ts=ts,
        namespace=bytes(32),
        block_hashes=keys,
        num_tokens=num_tokens,
        block_size=block_size,
        found_blocks={},
    )


def test_a_mooncake_trace_is_read_as_it_is(trace):
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    (batch,) = read_trace(trace)
    assert len(batch) == len(records)
    assert batch.num_tokens.tolist() == [record["input_length"] for record in records]
    assert batch.arrival_s.tolist() == [record["timestamp"] / 1000 for record in records]
    for (blocks, _, _), record in zip(batch.prompts(), records, strict=True):
        assert blocks.tolist() == record["hash_ids"]
    assert batch.tokens_of_block().sum() == batch.num_tokens.sum()
    first = records[0]["input_length"]
    assert batch.tokens_of_block()[: batch.offsets[1]].tolist() == [
        *[512] * (first // 512),
        first % 512,
    ]


def test_batches_split_a_trace_without_changing_it(trace, monkeypatch):
    (whole,) = read_trace(trace)
    monkeypatch.setattr(batches_module, "TARGET_BLOCKS", 300)
    parts = list(read_trace(trace))
    assert len(parts) > 3
    assert np.concatenate([part.blocks for part in parts]).tolist() == whole.blocks.tolist()
    assert sum(map(len, parts)) == len(whole)


def test_prompts_that_begin_alike_have_the_same_first_blocks(tmp_path):
    document = list(range(40))
    trace = write_lines(
        tmp_path / "t", document, {"token_ids": [*document[:32], 99] * 2, "timestamp": 2000}, [1]
    )
    (batch,) = read_trace(trace)
    (first, _, _), (second, num_tokens, arrival_s), (third, _, _) = batch.prompts()
    assert first.tolist() == second[:2].tolist()
    assert (len(second), num_tokens, arrival_s, len(third)) == (4, 66, 2.0, 0)
    assert len(set(second.tolist())) == 4, "a block's identity includes what is before it"
    (smaller,) = read_trace(trace, block_tokens=4)
    assert np.diff(smaller.offsets).tolist() == [10, 16, 0]


def test_texts_are_cut_where_the_tokenizer_says(tmp_path):
    trace = write_lines(tmp_path / "t", "abcd" * 5, {"prompt": "abcd" * 4})
    (batch,) = read_trace(trace, encode=lambda text: list(map(ord, text)))
    assert batch.num_tokens.tolist() == [20, 16]
    assert batch.blocks[0] == batch.blocks[1]
    with pytest.raises(ConfigError, match="--tokenizer"):
        list(read_trace(trace))


def test_an_event_file_is_a_trace_of_the_requests_in_it(tmp_path):
    keys = [bytes([i]) * 32 for i in range(5)]
    file = EventFile(tmp_path / "events")
    removed = BlockRemoved(ts=1.0, namespace=bytes(32), block_hashes=keys, medium="host")
    file([matched(keys[:3], 60, 100.0), removed, matched([*keys[:2], keys[4]], 50, 101.5)])
    file.close()
    for packed in (tmp_path / "events", compressed(tmp_path / "events")):
        (batch,) = read_trace(packed)
        assert batch.block_tokens == 16
        assert batch.num_tokens.tolist() == [60, 50]
        assert batch.arrival_s.tolist() == [0.0, 1.5]
        assert (batch.blocks[:2] == batch.blocks[3:5]).all()
        assert len(set(batch.blocks.tolist())) == 4
        assert batch.tokens_of_block().tolist() == [16] * 6


def test_events_of_two_block_sizes_are_no_trace(tmp_path):
    file = EventFile(tmp_path / "events")
    file([matched([], 5, 1.0, 16), matched([], 5, 1.0, 32)])
    file.close()
    with pytest.raises(TraceError, match="blocks of 16 and of 32 tokens"):
        list(read_trace(tmp_path / "events"))


def compressed(path: Path) -> Path:
    target = path.with_suffix(".gz")
    target.write_bytes(gzip.compress(path.read_bytes()))
    return target


def test_a_gzipped_trace_and_standard_input_are_read_alike(trace, tmp_path, monkeypatch):
    (plain,) = read_trace(trace)
    target = tmp_path / "trace"
    target.write_bytes(gzip.compress(trace.read_bytes()))
    (unpacked,) = read_trace(target)
    with io.TextIOWrapper(target.open("rb")) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        (piped,) = read_trace("-")
    assert unpacked.blocks.tolist() == piped.blocks.tolist() == plain.blocks.tolist()


GOOD = '{"input_length": 5, "hash_ids": [1]}\n'


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{nonsense", "line 2: not JSON"),
        ("[1, 2]", "line 2: expected an object with input_length and hash_ids"),
        ('{"input_length": 5}', "line 2: expected hash_ids"),
        ('{"hash_ids": [1]}', "line 2: expected input_length, a number of at least 0, got None"),
        ('{"input_length": -1, "hash_ids": [1]}', "line 2: expected input_length"),
        ('{"input_length": 5, "hash_ids": [1.5]}', "line 2: expected ids that are unsigned"),
        ('{"input_length": 5, "hash_ids": [-1]}', "line 2: expected ids that are unsigned"),
        ('{"input_length": 5, "hash_ids": [null]}', "line 2: expected ids that are unsigned"),
        ('{"input_length": 5, "hash_ids": [1], "timestamp": "x"}', "line 2: expected timestamp"),
        ("\x00\xff", "line 2"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path, line, reason):
    trace = tmp_path / "trace"
    trace.write_bytes((GOOD + line + "\n" + GOOD).encode("latin-1"))
    with pytest.raises(TraceError, match=reason) as error:
        list(read_trace(trace))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"hello", "the first line is of no known trace"),
        (b'{"question": 1}', "the first line is of no known trace"),
        (gzip.compress(GOOD.encode())[:-9], "damaged gzip"),
    ],
    ids=["nothing", "text", "unknown", "cut"],
)
def test_a_file_that_is_no_trace_is_named(tmp_path, content, reason):
    trace = tmp_path / "trace"
    trace.write_bytes(content)
    with pytest.raises(TraceError, match=reason):
        list(read_trace(trace))


def test_a_trace_that_is_not_there_is_the_caller_s_to_put_right(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        list(read_trace(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="format: expected one of"):
        list(read_trace(tmp_path / "absent", format="csv"))


def test_the_format_can_be_said(tmp_path):
    trace = write_lines(tmp_path / "t", {"prompt": "x", "token_ids": [1] * 32})
    (batch,) = read_trace(trace, format="tokens")
    assert batch.num_tokens.tolist() == [32]


def test_names_of_blocks_may_be_texts(tmp_path):
    trace = write_lines(tmp_path / "t", {"input_length": 3, "hash_ids": ["a", "b", "a"]})
    (batch,) = read_trace(trace)
    assert batch.blocks[0] == batch.blocks[2] != batch.blocks[1]
