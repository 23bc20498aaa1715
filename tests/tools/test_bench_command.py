import json


def test_a_benchmark_runs_in_a_process_of_its_own_with_its_options(kvstore):
    run = kvstore("bench", "memory-of-index", "--json")
    assert (run.returncode, run.stdout) == (2, "")
    assert "no benchmark 'memory-of-index'; there are" in run.stderr
    listed = dict(line.split(maxsplit=1) for line in kvstore("bench").stdout.splitlines())
    assert {"disk", "few-shot", "store", "ttft"} <= set(listed)
    assert listed["ttft"].startswith("Time to first token")
    help_text = kvstore("bench", "store", "--help")
    assert help_text.returncode == 0
    assert "--blocks" in help_text.stdout


def test_records_are_json_lines_with_the_machine(kvstore):
    run = kvstore("bench", "store", "--json", "--only", "match", "--tokens", "1600", "--runs", "1")
    assert run.returncode == 0, run.stderr
    record = json.loads(run.stdout)
    assert (record["case"], record["tokens"]) == ("match", 1600)
    assert record["machine"]["cores"] >= 1
