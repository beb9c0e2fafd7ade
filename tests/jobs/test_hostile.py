"""Objects of jobs that are damaged, forged, strange or another's: who meets them says so, and nobody is kept from
working by them."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archive
from archive.errors import ArchiveError, CorruptStateError, FieldError, JobError, NotFoundError, UsageError
from archive.jobs import receipts, records
from archive.maintain import verify

STEPS = 4


def filled(root: Path, count: int = 12) -> archive.Archive:
    arc = archive.create(str(root))
    with arc.writer() as w:
        for i in range(count):
            w.add_episode({"reward": np.arange(STEPS, dtype="f8") + i}, episode_id=f"e{i}")
    with arc.writer():
        pass
    return arc.refresh()


def doubled(steps: Mapping[str, Any]) -> dict[str, Any]:
    return {"twice": 2 * steps["reward"]}


def wide(steps: Mapping[str, Any]) -> dict[str, Any]:
    return {"wide": np.ones((len(steps["reward"]), 100_000)) * steps["reward"][0]}


class Broken:
    """A function that works until a flag is set."""

    broken = True

    def __init__(self, made: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
        self.made = made

    def __call__(self, steps: Mapping[str, Any]) -> dict[str, Any]:
        if steps["reward"][0] == 9 and Broken.broken:
            raise ValueError("not yet")
        return self.made(steps)


@pytest.fixture
def begun(tmp_path: Path) -> tuple[archive.Archive, Path, Callable[[], Any]]:
    """A job of twelve batches of which nine have a result; its folder, and the call that goes on."""
    return interrupted(tmp_path, doubled, "twice")


def interrupted(
    tmp_path: Path, made: Callable[[Mapping[str, Any]], dict[str, Any]], name: str
) -> tuple[archive.Archive, Path, Callable[[], Any]]:
    arc, Broken.broken = filled(tmp_path / "arc"), True
    fn = Broken(made)

    def call() -> Any:
        return arc.episodes.map(fn, ["reward"], [name], job="score", batch_size=1)

    with pytest.raises(ValueError, match="not yet"):
        call()
    Broken.broken = False
    return arc, tmp_path / "arc" / "jobs" / "score", call


def whole(arc: archive.Archive) -> None:
    arc = arc.refresh()
    for _, steps in arc.episodes.stream(["reward", "twice"]):
        assert (steps["twice"] == 2 * steps["reward"]).all()
    assert sum(arc.late_fields["length"].to_pylist()) == STEPS * len(arc.episodes)


def test_what_is_healthy_is_not_told(begun: tuple[archive.Archive, Path, Callable[[], Any]]) -> None:
    arc, folder, call = begun
    for deep in (False, True):
        report = verify(arc, deep=deep)
        assert (report.findings, report.warnings, report.notes) == ([], [], [])
    before = arc.usage
    call()
    whole(arc)
    report = verify(arc.refresh(), deep=True)
    assert (report.findings, report.warnings) == ([], [])
    results = sum(path.stat().st_size for path in folder.glob("*.zip"))
    assert arc.usage.prunable.bytes >= results
    assert before.prunable.bytes == 0
    arc.prune("0s", force=True, dry_run=False)
    assert arc.usage.prunable.bytes == 0


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def another(path: Path) -> None:
    path.write_bytes((path.parent / "000000001.zip").read_bytes())


@pytest.mark.parametrize("damage", [torn, flipped, emptied, another])
def test_a_damaged_result_is_not_committed_and_is_made_anew_once_it_is_deleted(
    begun: tuple[archive.Archive, Path, Callable[[], Any]], damage: Callable[[Path], None]
) -> None:
    arc, folder, call = begun
    damage(folder / "000000003.zip")
    assert [one.object for one in verify(arc, deep=True).warnings] == ["jobs/score/000000003.zip"]
    with pytest.raises(CorruptStateError, match=r"000000003\.zip"):
        call()
    assert arc.refresh().late_fields.num_rows == 0
    with pytest.raises(CorruptStateError, match="delete it, and run the job again"):
        call()  # though it was agreed on what is committed
    (folder / "000000003.zip").unlink()
    call()
    whole(arc)


def forge(folder: Path, number: int, arc: archive.Archive, **changes: Any) -> None:
    """Replace a result by one that is whole and says something else."""
    path = folder / f"{number:09d}.zip"
    known = receipts.Receipt(path.read_bytes(), f"jobs/score/{path.name}", path.name).index
    path.unlink()
    (made,) = (json.loads(one.read_text()) for one in folder.glob("round-*.json"))
    given = {"session": made["session"], "function": made["function"], "items": known.items} | changes
    which = np.array(given.pop("which", [0]), np.int64)
    values = given.pop("values", np.zeros(STEPS * len(which)))
    said = given.pop("said", known.said)
    result = receipts.Result(given.pop("tables", {}), {"0": which, "0/twice": values}, said, STEPS * len(which))
    store = receipts.Receipts(arc.storage, "score", given["session"], given["function"], 0)
    store.put(number, given["items"], result)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"session": "20200101-000000-abcdef"}, "of another round"),
        ({"function": "0" * 16}, "of another round"),
        ({"items": 2}, "of another round"),
        ({"which": [0, 0]}, "names episodes that its batch has not"),
        ({"which": [1]}, "names episodes that its batch has not"),
        ({"which": [-1]}, "names episodes that its batch has not"),
        ({"which": []}, "lack steps"),
        ({"values": np.zeros(STEPS - 1)}, "no array '0/twice' of 4 rows"),
        ({"said": ["{}"]}, "000000003"),
        ({"said": {"a": 1}}, "000000003"),
        ({"said": [1]}, "000000003"),
    ],
)
def test_a_forged_result_is_refused(
    begun: tuple[archive.Archive, Path, Callable[[], Any]], changes: dict[str, Any], told: str
) -> None:
    arc, folder, call = begun
    forge(folder, 3, arc, **changes)
    with pytest.raises(CorruptStateError, match=told):
        call()
    assert arc.refresh().late_fields.num_rows == 0


def test_large_columns_in_shards_of_others_are_refused(tmp_path: Path) -> None:
    arc, folder, call = interrupted(tmp_path, wide, "wide")
    known = receipts.Receipt((folder / "000000003.zip").read_bytes(), "jobs/score/000000003.zip", "it")
    late, chunks = known.table("late"), known.table("chunks")
    other = receipts.Receipt((folder / "000000004.zip").read_bytes(), "jobs/score/000000004.zip", "it")
    own = arc.snapshot.columns(["shard"])["shard"][0].as_py()
    forged = {
        "twice": {"late": late.take([0, 0]), "chunks": chunks},
        "of another batch": {"late": other.table("late"), "chunks": other.table("chunks")},
        "not of its session": {"late": changed(late, own), "chunks": changed(chunks, own)},
        "without chunks": {"late": late, "chunks": chunks.slice(0, 0)},
    }
    whole_one = (folder / "000000003.zip").read_bytes()
    for name, tables in forged.items():
        (folder / "000000003.zip").write_bytes(whole_one)
        (folder / "000000003.zip").unlink()
        (made,) = (json.loads(one.read_text()) for one in folder.glob("round-*.json"))
        steps = sum(tables["late"]["length"].to_pylist())
        store = receipts.Receipts(arc.storage, "score", made["session"], made["function"], 0)
        store.put(3, 1, receipts.Result(tables, steps=steps))
        with pytest.raises(CorruptStateError, match=r"000000003|lack steps|twice, or of others"):
            call()
        assert arc.refresh().late_fields.num_rows == 0, name
    (folder / "000000003.zip").write_bytes(whole_one)
    call()
    assert sum(arc.refresh().late_fields["length"].to_pylist()) == STEPS * 12


def changed(table: Any, shard: str) -> Any:
    import pyarrow as pa

    at = table.schema.get_field_index("shard")
    values = pa.array([shard] * table.num_rows, pa.string()).cast(table.schema.field("shard").type)
    return table.set_column(at, table.schema.field("shard"), values)


def rewritten(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"batches": 10**12}, {"items": 10**12}, {"first": 10**9}, {"batches": 11}, {"items": 11}, {"job": "other"},
        {"number": 7}, {"session": 4}, {"plan": None}, {"commit": -1}, {"kind": 3}, {"terms": []},
    ],
)  # fmt: skip
def test_a_forged_round_is_refused_and_can_be_cancelled(
    begun: tuple[archive.Archive, Path, Callable[[], Any]], changes: dict[str, Any]
) -> None:
    arc, folder, call = begun
    rewritten(folder / "round-000000.json", **changes)
    with pytest.raises(ArchiveError) as caught:
        call()
    assert isinstance(caught.value, CorruptStateError) or "was begun with" in str(caught.value), caught.value
    assert str(arc.jobs).count("score") == 1
    verify(arc, deep=True)
    arc.jobs["score"].cancel()
    archive.open(arc.url).prune("0s", force=True, dry_run=False)
    assert not list(folder.glob("*.zip"))


def test_a_plan_of_other_batches_is_refused(begun: tuple[archive.Archive, Path, Callable[[], Any]]) -> None:
    import google_crc32c
    import pyarrow.parquet as pq

    arc, folder, call = begun
    (path,) = folder.glob("plan-*.parquet")
    made = json.loads((folder / "round-000000.json").read_text())
    table = pq.read_table(path)
    for values in ([2**40] * 12, list(range(11, -1, -1)), [0] * 12, [*range(11), 12], [-1, *range(11)]):
        at = table.schema.get_field_index("batch")
        pq.write_table(table.set_column(at, "batch", [values]), path)
        data = path.read_bytes()
        crc = int(google_crc32c.value(data))
        rewritten(folder / "round-000000.json", plan=made["plan"] | {"bytes": len(data), "crc32c": crc})
        with pytest.raises(ArchiveError, match=r"plan of round 0|impossible batch"):
            call()
        assert [one.object for one in verify(arc).warnings] == ["jobs/score/round-000000.json"]


@pytest.mark.parametrize("path", ["../../archive.json", "/etc/passwd", "jobs/other/plan-00000000.parquet", "commits/x"])
def test_a_plan_elsewhere_is_not_read(begun: tuple[archive.Archive, Path, Callable[[], Any]], path: str) -> None:
    _, folder, call = begun
    made = json.loads((folder / "round-000000.json").read_text())
    rewritten(folder / "round-000000.json", plan=made["plan"] | {"path": path})
    with pytest.raises(ArchiveError):
        call()


@pytest.mark.parametrize(
    "batches", [[[0, 10**15]], [[3, 2]], [[0, 3], [2, 5]], [[0, 1], [0, 1]], [[20, 21]], [[0, 2, 3]], 4, [[-2, 1]]]
)
def test_a_forged_fold_is_refused(begun: tuple[archive.Archive, Path, Callable[[], Any]], batches: Any) -> None:
    arc, folder, call = begun
    (folder / "fold-000000.json").write_text(json.dumps({"round": 0, "batches": batches}))
    with pytest.raises(CorruptStateError, match="fold"):
        call()
    assert arc.refresh().late_fields.num_rows == 0


@pytest.mark.parametrize("name", ["made-000000.json", "end-000000.json", "kind-000000.json", "fold-000000.json"])
@pytest.mark.parametrize("data", [b"", b"{", b"[" * 5000, b"{}", b"\xff\xfe", b" " * 70_000])
def test_nonsense_in_place_of_a_record(
    begun: tuple[archive.Archive, Path, Callable[[], Any]], name: str, data: bytes
) -> None:
    arc, folder, call = begun
    (folder / name).write_bytes(data)
    with pytest.raises(CorruptStateError, match=name):
        assert [call(), arc.jobs["score"].about]
    assert str(arc.jobs).count("score") == 1
    assert [one.object for one in verify(arc).warnings] == [f"jobs/score/{name}"]
    assert arc.refresh().late_fields.num_rows == 0 or name == "made-000000.json"


def test_a_damaged_kind_is_no_failure_of_episodes(tmp_path: Path) -> None:
    arc, folder, _ = interrupted(tmp_path, doubled, "twice")
    (folder / "kind-000000.json").write_bytes(b"{")
    with pytest.raises(CorruptStateError, match="kind-000000"):
        arc.episodes.map(Broken(doubled), ["reward"], ["twice"], job="score", batch_size=1, on_error="skip")
    assert arc.jobs["score"].failed == {}


def test_strange_names_keep_nobody_from_working(begun: tuple[archive.Archive, Path, Callable[[], Any]]) -> None:
    arc, folder, call = begun
    jobs = folder.parent
    for name in ("%2E%2E", "a b", "%07", "%", "x" * 240, "%E9", "%41", "-", "plan only", ".hidden", "%0Ax"):
        (jobs / name).mkdir()
        (jobs / name / "000000000.zip").write_bytes(b"x")
        (jobs / name / "plan-00000000.parquet").write_bytes(b"x")
    (jobs / "a file").write_bytes(b"x")
    (folder / "deeper").mkdir()
    (folder / "deeper" / "000000000.zip").write_bytes(b"x")
    for name in ("round-1.json", "round-0000000.json", "000000001.zip.bak", "fold-000000.json~", "0000000001.zip"):
        (folder / name).write_bytes(b"x")
    assert list(arc.jobs) == ["score"]
    assert str(arc.jobs).count("\n") == 1
    assert verify(arc, deep=True).sound
    assert arc.usage.total.objects > 30
    arc.prune("0s", force=True, dry_run=False)
    call()
    whole(arc)
    archive.open(arc.url).prune("0s", force=True, dry_run=False)
    whole(arc)
    assert (folder / "000000001.zip.bak").exists(), "not made by this library"


@pytest.mark.parametrize(
    "name", ["../../up", "..", ".", "a/b", "/", "~", "é" * 33, "日本語", "a" * 200, "__x", "CON", "x y", "%2F", "*?[]"]
)
def test_names_of_jobs_are_names_alone(tmp_path: Path, name: str) -> None:
    arc = filled(tmp_path / "arc", 3)
    before = {path for path in tmp_path.rglob("*") if "jobs" not in path.parts}
    arc.episodes.map(doubled, ["reward"], ["twice"], job=name)
    assert list(arc.jobs) == [name]
    assert arc.jobs[name].finished
    assert name.isascii() is False or repr(name) in repr(arc.jobs[name])
    made = {path.relative_to(tmp_path / "arc").parts[:2] for path in (tmp_path / "arc" / "jobs").glob("*/*")}
    assert len(made) == 1
    assert {p for p in tmp_path.rglob("*") if "jobs" not in p.parts} >= before
    assert not (tmp_path / "up").exists()


@pytest.mark.parametrize("name", ["", " ", "\t", "a\nb", "\x1b[2J", "a" * 201, "é" * 34, "\ud800", "\u202e", 7, b"x"])
def test_names_that_no_job_has(tmp_path: Path, name: Any) -> None:
    arc = filled(tmp_path / "arc", 3)
    with pytest.raises(UsageError):
        arc.episodes.map(doubled, ["reward"], ["twice"], job=name)
    with pytest.raises((UsageError, NotFoundError)):
        arc.jobs[name]
    assert not (tmp_path / "arc" / "jobs").exists()


def test_errors_of_functions_act_on_no_terminal(tmp_path: Path) -> None:
    arc = filled(tmp_path / "arc", 3)

    def fails(steps: Mapping[str, Any]) -> dict[str, Any]:
        raise ValueError("\x1b[2J\ud800\n" + "x" * 10_000)

    arc.episodes.map(fails, ["reward"], ["twice"], job="score", on_error="skip")
    failed = arc.jobs["score"].failed
    assert failed.keys() == {"e0", "e1", "e2"}
    assert all(text.isprintable() and len(text) < 2000 and "ValueError" in text for text in failed.values())


def test_arguments_that_are_too_long_to_be_recorded(tmp_path: Path) -> None:
    arc = filled(tmp_path / "arc", 3)
    with pytest.raises((UsageError, FieldError), match="bytes"):
        arc.episodes.map(doubled, ["reward"], [f"{i}" * 90 for i in range(1000)], job="score")
    assert arc.jobs.unfinished() == []
    arc.episodes.map(doubled, ["reward"], ["twice"], missing={"reward": [0.5] * 50_000}, job="other")
    assert arc.jobs["other"].finished


def test_a_function_that_is_at_work_when_it_is_replaced_commits_nothing_more(tmp_path: Path) -> None:
    arc = filled(tmp_path / "arc")

    def thrice(steps: Mapping[str, Any]) -> dict[str, Any]:
        return {"twice": 3 * steps["reward"]}

    def old(steps: Mapping[str, Any]) -> dict[str, Any]:
        if steps["reward"][0] == 9:
            archive.open(arc.url).episodes.map(thrice, ["reward"], ["twice"], job="score", only="stale")
        return {"twice": 2 * steps["reward"]}

    with pytest.raises(JobError, match="was replaced by another process"):
        arc.episodes.map(old, ["reward"], ["twice"], job="score", batch_size=1)
    for _, steps in archive.open(arc.url).episodes.stream(["reward", "twice"]):
        assert (steps["twice"] == 3 * steps["reward"]).all()


def test_a_driver_that_slept_until_the_job_was_finished_and_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arc, slept = filled(tmp_path / "arc"), []

    def sleeps(steps: Mapping[str, Any]) -> dict[str, Any]:
        if steps["reward"][0] == 9 and not slept:
            slept.append(1)
            archive.open(arc.url).episodes.map(sleeps, ["reward"], ["twice"], job="score", batch_size=1)
            archive.open(arc.url).prune("0s", force=True, dry_run=False)
        return doubled(steps)

    arc.episodes.map(sleeps, ["reward"], ["twice"], job="score", batch_size=1)
    whole(arc)
    assert len(list((tmp_path / "arc" / "jobs" / "score").glob("fold-*"))) == 1


def test_redaction_waits_for_jobs_that_read_the_episodes(
    begun: tuple[archive.Archive, Path, Callable[[], Any]],
) -> None:
    arc, _, call = begun
    with arc.writer() as w:
        w.add_episode({"reward": np.arange(STEPS, dtype="f8")}, episode_id="later")
    with arc.writer():
        pass
    arc = arc.refresh()
    plan = arc.forget(ids=["e3"], redact=True)
    assert [one for one in plan.obstacles if "jobs that have not ended read them: score" in one]
    with pytest.raises(UsageError, match="finish them by the same calls, or cancel them"):
        arc.forget(ids=["e3"], redact=True, dry_run=False)
    assert arc.forget(ids=["later"], redact=True).obstacles == ()
    call()
    arc = arc.refresh()
    assert arc.forget(ids=["e3"], redact=True, dry_run=False).obstacles == ()
    arc.prune("0s", force=True, dry_run=False)
    check_gone(Path(arc.url.removeprefix("file://")), "e3")


def check_gone(root: Path, name: str) -> None:
    """No object says the name of an episode, but for what tells of the redaction."""
    for path in root.rglob("*"):
        if path.is_file() and path.suffix == ".zip" and zipfile.is_zipfile(path):
            assert not re.search(rf"\b{name}\b".encode(), path.read_bytes()), path


def test_results_are_named_as_their_records_say() -> None:
    assert records.is_result("jobs/x/000000001.zip")
    assert records.is_result("jobs/x/failed-000001.parquet")
    assert records.is_record("jobs/x/fold-000001.json")
    for key in ("jobs/x/y/000000001.zip", "shards/x/000000001.zip", "jobs/000000001.zip", "jobs/x/00000001.zip"):
        assert not records.is_result(key)
        assert not records.is_record(key)
