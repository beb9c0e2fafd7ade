"""Moving data: `reshard`, `merge`, `split` and `filter` to other archives; `export` and `import` of other files."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from archive.base import NotFoundError, UsageError, layout
from archive.cli import options as opt
from archive.cli import output
from archive.cli.commands import MOVE, command
from archive.cli.options import Target
from archive.cli.output import Output
from archive.observe import bar

if TYPE_CHECKING:
    from archive import Archive, Checkpoint, Episode, Episodes

# -- to another archive ------------------------------------------------------------------------------------------------

MOVING = (
    opt.option("--verify", "Read every byte that is copied, and compare it with its checksum."),
    opt.option("--copy", "Copy the shards. Without this, the other archive refers to them where they are."),
    opt.option("--to URL", "The other archive; created if it is not there.", required=True),
    *opt.OF_JOB,
)


def _opened(target: Target, others: tuple[str, ...] = (), *, copy: bool, verify: bool, **_: Any) -> list[Archive]:
    """The sources, once it is known that the call makes sense."""
    if verify and not copy:
        raise UsageError("--verify is of copies: add --copy, or leave it out (`archive verify --deep` reads all)")
    return [target.open(url=url) for url in (target.url, *others)]


def _moved(target: Target, name: str, sources: list[Archive], do: Callable[..., Any], **how: Any) -> Any:
    """The result of `do` with the other archive, while a bar is drawn. It may refer to the sources."""
    allowed = (*target.allow_bases, *(source.url for source in sources))
    options = {"storage_options": target.storage_options, "allow_bases": allowed, "single_writer": target.single_writer}
    with bar(name, sources) as advance:
        return do(progress=advance, **options, **how)


def _made(made: Archive) -> Output:
    about = {"url": made.url, "commit": made.head.number, "episodes": len(made.episodes)}
    return Output(about, "{url} has {episodes} episodes at commit {commit}".format(**about))


@command(MOVE, opt.argument("world_size", type=opt.COUNT), *opt.PLANNING, *MOVING, writes=True)
def reshard(target: Target, world_size: int, to: str, **planning: Any) -> Output:
    """Save a checkpoint in another archive for WORLD_SIZE ranks.

    `archive plan` shows what it does.
    """
    import resharding

    how: dict[str, Any] = {name: planning.pop(name) for name in ("copy", "verify", "engine", "workers", "job")}
    how["to"] = to
    (source,) = _opened(target, **how)
    plan = opt.planned(source, world_size, **planning)
    made = _moved(target, "reshard", [source], resharding.reshard, source=source, plan=plan, **how)
    about = {"checkpoint": made.name, "commit": made.number, "ranks": made.world_size, "steps": plan.steps}
    text = f"checkpoint {made.name!r} is in {to}, saved by {made.world_size} ranks of {output.cell(plan.steps)} steps"
    return Output(about | {"dropped": plan.dropped}, text)


@command(MOVE, opt.argument("others", nargs=-1), *MOVING, writes=True)
def merge(target: Target, others: tuple[str, ...], **how: Any) -> Output:
    """Make the episodes of several archives visible in one.

    The archives are URL and OTHERS. Run again, it adds what is new.
    """
    import resharding

    sources = _opened(target, others, **how)
    return _made(_moved(target, "merge", sources, resharding.merge, urls=sources, **how))


@command(
    MOVE,
    opt.argument("count", type=opt.COUNT),
    opt.where("The first COUNT of those that meet it, as in 'return > 10'."),
    *MOVING,
    writes=True,
)
def split(target: Target, count: int, where: str | None, **how: Any) -> Output:
    """Make the first COUNT episodes visible in another archive."""
    import resharding

    (source,) = _opened(target, **how)
    found = source.episodes.filter(where=where)
    if count > len(found):
        raise UsageError(f"COUNT is {count}, and there are {len(found)} such episodes at {source.url}")
    ids = found[:count].table["episode_id"].to_pylist()
    return _made(_moved(target, "split", [source], resharding.filter, url=source, episode_id=ids, **how))


@command(
    MOVE, opt.where("The condition, as in 'return > 10 and update_count >= 100'.", required=True), *MOVING, writes=True
)
def filter_(target: Target, where: str, **how: Any) -> Output:
    """Make matching episodes visible in another archive."""
    import resharding

    (source,) = _opened(target, **how)
    source.episodes.filter(where=where)  # refused before anything is made
    return _made(_moved(target, "filter", [source], resharding.filter, url=source, where=where, **how))


# -- other systems' files ----------------------------------------------------------------------------------------------

ADAPTERS = {  # the module of each, and whether it takes checkpoints or episodes
    "rlinf": ("rlinf", "checkpoint"),
    "alf": ("alf", "checkpoint"),
    "minari": ("minari", "dataset"),
    "lerobot": ("lerobot", "dataset"),
    "d3rlpy": ("npz", "dataset"),
}
OF_WORK = {"engine", "job", "workers", "num_cpus", "progress"}
OURS = {"run", "storage_options", "fields", *OF_WORK}  # have options of their own, or none
SET = opt.option("--set given KEY=VALUE...", "An option of the format's adapter, as in 'fps=10'; VALUE may be JSON.")


def adapter(target: Target, verb: str, name: str, given: tuple[str, ...]) -> Callable[..., Any]:
    """The function of an adapter that exports or imports, with the options that were given and those of the storage.
    UsageError if it does not take these."""
    module, unit = ADAPTERS[name]
    found: Callable[..., Any] = getattr(import_module(f"archive.adapters.{module}"), f"{verb}_{unit}")
    options, parameters = opt.of_pairs(given), inspect.signature(found).parameters
    known = {p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY} - OURS
    passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = sorted(options.keys() & OURS if passes_on else options.keys() - known)
    if unknown:
        raise UsageError(f"--set {unknown[0]}: {verb} of {name} takes {', '.join(sorted(known)) or 'no options'}")
    stores = {"storage_options": target.storage_options} if "storage_options" in parameters else {}
    return partial(found, **options, **stores)


def _is_job(work: Mapping[str, Any]) -> bool:
    """True if other options of work were given than the defaults."""
    return work["engine"] != "local" or any(work[name] is not None for name in ("workers", "job"))


def _going_on(arc: Archive, work: Mapping[str, Any]) -> list[str]:
    """The session of the job, if that was begun before, and has not ended."""
    return [one.session for one in arc.jobs.unfinished() if one.job == work["job"]] if work["job"] else []


@contextmanager
def _made_if_need_be(target: Target) -> Iterator[Archive]:
    """The archive, made if there is none; and not left behind if an error comes before anything is in it."""
    try:
        arc, was_there = target.open(), True
    except NotFoundError:
        arc, was_there = target.open(create=True), False
    try:
        yield arc
    except BaseException:
        if not was_there and arc.storage.list("") == [layout.ARCHIVE_KEY]:
            arc.storage.delete([layout.ARCHIVE_KEY])
        raise


BULK = ("npz", "parquet")  # plain files that need no other system
ONLY_HTML = ("output", "world_size", "max_bytes", "tokenizer", "allow_missing")


@command(
    MOVE,
    opt.argument("to", required=False),
    opt.option(f"--format -f name {'|'.join((*BULK, *ADAPTERS))}", "The files' format.", default="npz"),
    opt.option(
        "--html WHAT",
        "Make one HTML page instead: of an episode (its id, or 'best'), of the chosen 'episodes', of a checkpoint "
        "(its name, or 'latest'), or of the 'archive'. Needs --output.",
    ),
    opt.option("--output -o FILE", "The file of the page."),
    opt.option("--world-size N", "The page shows a checkpoint's plan for N ranks."),
    opt.option("--checkpoint NAME", "Only what is live in it ('latest': the newest whole one)."),
    opt.of_run("The run of the checkpoint, or of the episodes."),
    opt.where(),
    opt.option("--weights UUID...", "Only episodes made by these weights."),
    opt.option("--field fields NAME...", "Only this field (npz, parquet, an episode's page)."),
    opt.option("--max-bytes N", "Bound of an episode's page; it names what it omits."),
    opt.option("--tokenizer NAME", "Shows token ids as text on an episode's page: a folder or a Hub name."),
    opt.option("--allow-missing", "The page of a plan: do without ranks that are missing."),
    SET,
    *opt.OF_JOB,
    opt.option("--yes", "Replace files that are there."),
)
def export(
    target: Target, to: str | None, name: str, html: str | None, yes: bool, given: tuple[str, ...], engine: str,
    workers: int | None, job: str | None, **how: Any,
) -> Output:  # fmt: skip
    """Write episodes or a checkpoint as files or an HTML page.

    TO is a folder or a file. rlinf and alf take a checkpoint (default: the newest whole one), the other formats take
    episodes (default: all). A page of --html needs no network: it shows an episode that plays, episodes in rows to
    sort and filter, a checkpoint's ranks, a plan, or the archive with its runs.
    """
    work = {"engine": engine, "workers": workers, "job": job}
    if (html is not None or name not in BULK) and _is_job(work):
        raise UsageError(f"--engine, --workers and --job go with the formats {' and '.join(BULK)}")
    if html is not None:
        return _page(target, to or how["output"], html, yes, given, how)
    if to is None or any(how.pop(name) for name in ONLY_HTML):
        raise UsageError(
            "give TO, a folder or file; --output, --world-size, --max-bytes, --tokenizer and --allow-missing go with "
            "--html"
        )
    fields = list(how.pop("fields"))
    if name in BULK:
        return _to_plain_files(target, to, name, given, fields, work, yes=yes, **how)
    return _to_system(target, to, name, given, fields, **how)


def _to_plain_files(
    target: Target,
    to: str,
    name: str,
    given: tuple[str, ...],
    fields: list[str],
    work: Mapping[str, Any],
    *,
    yes: bool,
    **how: Any,
) -> Output:
    import resharding
    from archive.store import Storage

    if opt.of_pairs(given):
        raise UsageError(f"--set is for adapters; {name} has none")
    arc = target.open()
    episodes = _chosen(arc, **how)
    files = Storage.connect(to, target.storage_options).list("")
    there = sum(file.startswith("part-") and file.endswith(f".{name}") for file in files)
    if there and not yes and not _going_on(arc, work):
        raise UsageError(
            f"{to} has {there} files, some of which would be replaced by those of {len(episodes)} episodes; nothing "
            "was done: give another folder, or add --yes"
        )
    options: dict[str, Any] = {"format": name, "fields": fields or None, "storage_options": target.storage_options}
    with bar(f"export {name}", [arc]) as advance:
        made = resharding.export(episodes, to, progress=advance, **options, **work)
    about = {"to": to, "format": name, "episodes": len(episodes), "files": made}
    return Output(about, f"{len(episodes)} episodes are in {len(made)} files at {to}")


def _chosen(
    arc: Archive, checkpoint: str | None, run: str | None, where: str | None, weights: tuple[str, ...]
) -> Episodes:
    if checkpoint:
        found = opt.named_checkpoint(arc, checkpoint, run, replay=True).episodes
    else:
        found = arc.episodes if run is None else arc.runs[run].episodes
    return found.filter(where=where, model_weights_uuid=weights or None)


def _to_system(target: Target, to: str, name: str, given: tuple[str, ...], fields: list[str], **how: Any) -> Output:
    from archive.adapters import Report

    arc = target.open()
    write = adapter(target, "export", name, given)
    if ADAPTERS[name][1] == "dataset":
        source: Any = _chosen(arc, **how)
        write = partial(write, fields=fields) if fields else write
    elif fields:
        raise UsageError(f"--field is for formats of episodes; {name} takes a checkpoint whole")
    elif how["where"] or how["weights"]:
        raise UsageError(f"{name} takes a checkpoint whole: leave out --where and --weights, or `archive filter` first")
    else:
        source = opt.named_checkpoint(arc, how["checkpoint"], how["run"], replay=True)
    with bar(f"export {name}", [arc]):
        made = write(source, to)
    report = f": {made}" if isinstance(made, Report) else ""
    about = {"to": to, "format": name, "source": str(source)} | ({"report": str(made)} if report else {})
    return Output(about, f"{source} was written to {to} for {name}{report}")


@command(
    MOVE,
    opt.argument("sources", nargs=-1, required=True),
    opt.option(f"--format -f name {'|'.join(ADAPTERS)}", "The format of SOURCES.", required=True),
    opt.of_run("The run that the checkpoint belongs to.", default="imported"),
    SET,
    *opt.OF_JOB,
    opt.option("--yes", "Do it, even if it ends the session of a run that is there."),
    writes=True,
)
def import_(
    target: Target, sources: tuple[str, ...], name: str, run: str, given: tuple[str, ...], yes: bool, **work: Any
) -> Output:
    """Add another system's data as a checkpoint.

    Creates the archive if it is not there. SOURCES is a file, folder or name as the other system has it; for alf, one
    file for each rank.
    """
    if len(sources) > 1 and name != "alf":
        raise UsageError(f"{name} has one source, not {len(sources)}; import them one after the other")
    read = adapter(target, "import", name, given)
    is_dataset = ADAPTERS[name][1] == "dataset"
    if is_dataset:
        read = partial(read, **work)
    elif _is_job(work):
        raise UsageError(f"--engine, --workers and --job are for imports of episodes; {name} has a checkpoint")
    with _made_if_need_be(target) as arc:
        if run in arc.head.runs and not yes and arc.head.runs[run].session not in _going_on(arc, work):
            raise UsageError(
                f"{arc.url} has a run {run!r}, and a job that still writes to it could no longer commit; nothing was "
                "done: give another --run, or add --yes"
            )
        with bar(f"import {name}", [arc], "batches") as advance:
            told = {"progress": advance} if is_dataset else {}
            made = read(list(sources) if len(sources) > 1 else sources[0], arc, run=run, **told)
    numbers = {"checkpoint": made.name, "commit": made.number, "step": made.step, "ranks": made.world_size}
    count = len(made.episodes)
    text = f"checkpoint {made.name!r} of {arc.url} has {count} episodes of {', '.join(sources)}"
    return Output(numbers | {"episodes": count}, text)


# -- pages -------------------------------------------------------------------------------------------------------------

BEST = "best"  # the episode of the greatest return, where none has this id
EPISODES = "episodes"  # all that meet the conditions, where no episode has this id
WHOLE = "archive"  # the archive itself, or a run of it, likewise


def _page(
    target: Target, file: str | None, what: str, replace: bool, given: tuple[str, ...], how: Mapping[str, Any]
) -> Output:
    from archive.store import file_exists, local_path, write_file

    if how["checkpoint"] or given or (how["world_size"] and how["weights"]):
        raise UsageError("--html takes a checkpoint's name itself, and no --set; a plan no --weights")
    if file is None:
        raise UsageError("--html wants a file to write: add --output FILE")
    arc, path = target.open(), None if "://" in file else local_path(file, "--output")
    if path is not None and (not path.parent.is_dir() or path.is_dir()):
        raise UsageError(f"--output {file} is no file in a folder that is there: make the folder, or give another")
    place, options = (file, target.storage_options) if path is None else (str(path), {})
    if file_exists(place, options) and not replace:
        raise UsageError(f"{file} is there; nothing was done: give another --output, or add --yes to replace it")
    choice = {name: how[name] for name in ("run", "where", "weights", "world_size", "allow_missing")}
    of_episode = {"fields": list(how["fields"]), "max_bytes": how["max_bytes"], "tokenizer": how["tokenizer"]}
    title, text = page_of(arc, what, **choice, **{name: value for name, value in of_episode.items() if value})
    write_file(place, text.encode(), storage_options=options)  # whole or not at all
    return Output({"to": file, "format": "html", "source": title}, f"{title} is in {file}")


def page_of(
    arc: Archive,
    what: str,
    *,
    run: str | None,
    where: str | None,
    weights: tuple[str, ...],
    world_size: int | None,
    allow_missing: bool,
    **how: Any,
) -> tuple[str, str]:
    """Title and text of the page of an episode's id or a checkpoint's name ("latest"), with a world size of its plan.

    how: options of an episode's page, as of Episode.to_html; a UsageError for another one's. NotFoundError if there is
    nothing of that name.
    """
    if world_size:
        import resharding

        _refuse(how, "plan")
        checkpoint = _shown(arc, what, run, "checkpoint")
        made = resharding.plan(checkpoint, world_size, filter=where, allow_missing=allow_missing, tails="ignore")
        return f"plan of {checkpoint.name} for {world_size} ranks", made.to_html()
    if run is not None:
        arc.runs[run]  # a run that is not there is an error of its own
    found = arc.episodes.filter(where=where, model_weights_uuid=weights or None, run=run)
    if len(named := found.filter(episode_id=what)):
        return f"episode {what}", named[0].to_html(**how)
    if what == BEST and (best := _best(found)) is not None:
        return f"episode {best.id}", best.to_html(**how)
    if what == EPISODES:
        _refuse(how, "list of episodes")
        return f"{len(found)} episodes", found.to_html()
    if where is not None or weights:
        raise NotFoundError(
            f"no episode {what!r} at {arc.url} meets --where and --weights; `archive episodes` lists those that do"
        )
    if what == WHOLE:
        _refuse(how, "whole archive")
        return (what, arc.to_html()) if run is None else (f"run {run}", arc.runs.to_html(run))
    checkpoint = _shown(arc, what, run, "episode or checkpoint")
    _refuse(how, "checkpoint")
    return f"checkpoint {checkpoint.name}", checkpoint.to_html()


def _refuse(how: Mapping[str, Any], kind: str) -> None:
    if how:
        option = "--" + ("field" if "fields" in how else min(how).replace("_", "-"))
        raise UsageError(f"{option} is for the page of an episode; that of a {kind} shows no steps: leave it out")


def _best(found: Episodes) -> Episode | None:
    """The episode of the greatest return."""
    import pyarrow.compute as pc

    returns = found.columns(["return"])["return"]
    greatest = pc.max(returns)
    return found[pc.index(returns, greatest).as_py()] if greatest.is_valid else None


def _shown(arc: Archive, name: str, run: str | None, kind: str) -> Checkpoint:
    """The checkpoint of this name, or the newest whole one."""
    opt.checkpoints_of(arc, run)  # a run that is not there is an error of its own
    try:
        return opt.named_checkpoint(arc, name, run)
    except NotFoundError:
        raise NotFoundError(
            f"there is no {kind} {name!r} at {arc.url}; `archive episodes` and `archive checkpoints` list them"
        ) from None
