"""Pages of their own: the viewer in one file, with the answers that it needs there, and no network. That of an episode
keeps to a number of bytes."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlencode

import numpy as np
import pyarrow as pa

from archive.base import NotFoundError, UsageError, cached_property, size
from archive.fields import Ragged
from archive.log import about
from archive.view import bundle, frames, rollouts, texts
from archive.view.answers import QUESTIONS
from archive.view.checkpoints import planned, told_of
from archive.view.fields import GAMMA, REWARD, returns_of
from archive.view.shown import Listing, Settings, Shown, checkpoint_at
from archive.view.tokens import Decode, decoder
from archive.view.wire import Query, Reply, arrow_reply, bytes_reply

if TYPE_CHECKING:
    from archive import Archive, Checkpoint, Episode, Episodes
    from archive.log import Commit
    from archive.store import Storage
    from resharding import Plan

Fitted = tuple[Any, str]  # what the page is given, None for nothing, and what there was no room for
Maker = Callable[[dict[str, Any], list[str]], str]  # the page of what was given, and of what was left out
UNBOUNDED = 2**62
TRIES = 6
FIELD_BYTES = 300  # of a field, beside its values
EXACT_FLOAT32 = 2**24  # integers beyond have no float32 of their own
MIN_SHARE = 0.002  # of a curve's values; one of fewer is left out
MIN_STEP_CHARS = 30  # of a step's text, where there is little room; less says nothing
MAX_FILM_BYTES = 24 * 1024 * 1024  # of one field's pictures, before they are packed
MIN_FILM_SIDE = 112  # pixels that a picture keeps if there is not room for all
LEVEL = 6  # of deflate
SAMPLES = 8  # pictures that tell how well the others pack
SPARE = 1.25  # of what the samples say, as others may pack less well


class Part(NamedTuple):
    """One or several fields of an episode: `need` bytes hold all of it, `fit` makes what so many bytes hold."""

    kind: str  # films, curves, texts, rollout
    path: str
    need: int
    fit: Callable[[int], Fitted]


def _parts(
    leaves: Mapping[str, Any],
    rollout: rollouts.Rollout | None,
    derived: Mapping[str, Any],
    steps: int,
    decode: Decode | None,
) -> Iterator[Part]:
    """A part for each field; `derived`: curves that follow from rewards."""
    ids = {track.path for track in rollout.tracks} if rollout else set()
    said = rollout.paths | (ids if rollout.flat else set()) if rollout else set()
    for path, leaf in leaves.items():
        if path in said:
            continue
        if path not in ids and (pictures := frames.as_pictures(leaf)):
            yield _film(path, pictures, steps)
        elif path not in ids and (lines := frames.as_curves(leaf)):
            yield _curves(path, lines)
        elif text := texts.as_texts(leaf):
            yield _texts(path, text.steps)
    for path, values in derived.items():
        yield _curves(path, {"": values}, derived=True)
    if rollout:
        yield _conversation(rollout, decode)


def _within(parts: list[Part], made: Maker, max_bytes: int | None, name: str) -> str:
    """The page that `made` makes of what the parts give and of what was left out; UsageError if not even that fits."""
    if max_bytes is None:
        return _filled(parts, [UNBOUNDED] * len(parts), made)
    space = max_bytes - len(made({}, []).encode())
    text = ""
    for _ in range(TRIES):
        text = _filled(parts, _dealt([part.need for part in parts], space), made)
        over = len(text.encode()) - max_bytes
        if over <= 0:
            return text
        space -= over + over // 8 + 64
        if space < 0:
            break
    raise UsageError(
        f"the page of episode {name!r} does not fit into max_bytes={max_bytes}: it takes "
        f"{len(text.encode())} with next to nothing on it; allow more, or name fewer fields="
    )


def _why_left_out(max_bytes: int | None) -> str:
    """The heading of what was left out."""
    return "Left out" if max_bytes is None else f"Left out, as this page is held to {size(max_bytes)}"


def _filled(parts: list[Part], room: list[int], made: Maker) -> str:
    held: dict[str, Any] = {"films": {}, "curves": {}, "texts": {}, "rollout": None}
    left_out = []
    for part, most in zip(parts, room, strict=True):
        value, left = part.fit(most)
        if part.kind == "rollout":
            held["rollout"] = value
        elif value is not None:
            held[part.kind][part.path] = value
        left_out += [left] if left else []
    return made(held, left_out)


def _dealt(needs: list[int], most: int) -> list[int]:
    """Bytes for each: what it needs, or its equal share of what those of small needs leave."""
    out, left = [0] * len(needs), max(0, most)
    for number, i in enumerate(sorted(range(len(needs)), key=needs.__getitem__)):
        out[i] = min(needs[i], left // (len(needs) - number))
        left -= out[i]
    return out


def _conversation(rollout: rollouts.Rollout, decode: Decode | None) -> Part:
    """A rollout, and what is known of each token; where there is little room, its beginning."""
    blocks = rollouts.blocks_of(rollout, decode)

    def fit(most: int) -> Fitted:
        kept, left_out = rollouts.fitted(blocks, most - FIELD_BYTES)
        about = {"texts": decode is not None, "left_out": left_out}
        return ({"blocks": kept, **rollouts.about(rollout), **about} if kept else None), left_out

    return Part("rollout", "", bundle.json_bytes(blocks) + FIELD_BYTES, fit)


def _texts(path: str, steps: list[str]) -> Part:
    """The text of each step; where there is little room, short ones of all, or of one step in two, three, ..."""
    need = bundle.json_bytes(steps) + FIELD_BYTES

    def fit(most: int) -> Fitted:
        if most >= need:
            return {"steps": steps, "every": 1}, ""
        chars = int(sum(map(len, steps)) * max(0, most - FIELD_BYTES) / need)
        every = max(1, -(-len(steps) * MIN_STEP_CHARS // max(1, chars)))
        kept = steps[::every]
        limit = max(MIN_STEP_CHARS, chars // max(1, len(kept)) - MIN_STEP_CHARS)
        thinned = f", and all but one step in {every}" if every > 1 else ""
        short = [texts.shortened(said, limit) for said in kept]
        return {"steps": short, "every": every}, f"{path}: most of longer texts{thinned}"

    return Part("texts", path, need, fit)


def _curves(path: str, lines: Mapping[str, frames.Array], *, derived: bool = False) -> Part:
    """The numbers of all lines, one after the other; where there is little room, of one step in two, three, ..."""
    values = np.stack(list(lines.values()))
    wide = np.abs(values[np.isfinite(values)]).max(initial=0) > EXACT_FLOAT32
    packed = values.astype("<f8" if wide else "<f4")
    need = packed.nbytes * 4 // 3 + FIELD_BYTES

    def fit(most: int) -> Fitted:
        share = min(1.0, (most - FIELD_BYTES) / max(1, need - FIELD_BYTES))
        if share < MIN_SHARE:
            return None, f"{path}: its curves"
        every = int(np.ceil(1 / share))
        kept = np.ascontiguousarray(packed[:, ::every])
        text = base64.b64encode(kept.tobytes()).decode()
        about = {"parts": list(lines), "length": kept.shape[1], "every": every, "derived": derived}
        left_out = f"{path}: one value in {every}" if every > 1 else ""
        return {**about, "width": packed.dtype.itemsize, "values": text}, left_out

    return Part("curves", path, need, fit)


# -- films -------------------------------------------------------------------------------------------------------------


def _film(path: str, pictures: frames.Pictures, steps: int) -> Part:
    """The pictures, packed; where there is little room, fewer rows and columns, then every n-th picture."""
    packing = _packing(pictures.pixels)
    need = int(min(pictures.pixels.nbytes, MAX_FILM_BYTES) * packing * SPARE) + FIELD_BYTES

    def fit(most: int) -> Fitted:
        made = _fitted(pictures, steps, packing, most - FIELD_BYTES)
        if made is None:
            return None, f"{path}: its pictures"
        thinned = made["note"].partition("pixels; ")[2]
        return made, f"{path}: {thinned}" if thinned else ""

    return Part("films", path, need, fit)


def _fitted(pictures: frames.Pictures, steps: int, packing: float, most: int) -> dict[str, Any] | None:
    """The film, of at most so many characters of pixels; None if no picture fits."""
    limit = min(MAX_FILM_BYTES, int(most / packing))
    while limit > 0:
        made = _thinned(pictures, steps, limit)
        if len(made["pixels"]) <= most:
            return made
        if made["count"] == 1 and min(made["width"], made["height"]) < 2 * frames.MIN_SIDE:
            return None
        limit = int(limit * min(0.9, 0.98 * most / len(made["pixels"])))
    return None


def _thinned(pictures: frames.Pictures, steps: int, limit: int) -> dict[str, Any]:
    """At most `limit` bytes of pixels, but one picture of few pixels at least."""
    pixels = pictures.pixels
    count, height, width, _ = pixels.shape
    apart = _apart(pixels.nbytes, limit, min(height, width), 1, MIN_FILM_SIDE)
    apart = _apart(pixels.nbytes // max(1, count), limit, min(height, width), apart, frames.MIN_SIDE)
    pixels = pixels[:, ::apart, ::apart]
    every = max(1, -(-pixels.nbytes // max(1, limit)))
    kept = np.ascontiguousarray(pixels[::every])
    notes = (
        pictures.note,
        f"{height} x {width} pixels",
        f"one row and column in {apart}" if apart > 1 else "",
        f"one picture in {every}" if every > 1 else "",
    )
    return {
        "width": kept.shape[2],
        "height": kept.shape[1],
        "count": len(kept),
        "every": max(1, round(steps / count)) * every,
        "pixels": base64.b64encode(zlib.compress(kept.tobytes(), LEVEL)).decode(),
        "note": "; ".join(filter(None, notes)),
    }


def _apart(nbytes: int, limit: int, side: int, apart: int, min_side: int) -> int:
    """One row and column in how many is kept, so that they fit, or as many are left as there must be."""
    while nbytes > limit * apart**2 and side // (apart + 1) >= min_side:
        apart += 1
    return apart


def _packing(pixels: frames.Array) -> float:
    """Characters of a page for a byte of pixels."""
    if not len(pixels):
        return 1.0
    some = np.ascontiguousarray(pixels[np.unique(np.linspace(0, len(pixels) - 1, SAMPLES).astype(np.int64))])
    return max(len(zlib.compress(some.tobytes(), LEVEL)) / max(1, some.nbytes), 1e-3) * 4 / 3


MAX_ROWS = 200_000
MAX_BYTES = 16_000_000  # of a table, packed
MOST_METADATA = 20  # columns of metadata
MOST_DETAILS = 8  # checkpoints that are told of in full: the newest of each run
NOT_SAVED = "this is a saved page"
_TABLES = ("episodes", "compare")


class Still(Shown):
    """Some episodes as they are now, of which nothing becomes known that they do not say themselves."""

    def __init__(self, episodes: Episodes, tokenizer: Any = None) -> None:
        snapshot = episodes.reader.snapshot
        super().__init__(archive_at(snapshot.storage, snapshot.commit), Settings(tokenizer=tokenizer))
        self._listing = Listing(episodes, ("still",), snapshot.commit)

    def listing(self, query: Query) -> Listing:
        """Return these episodes, whatever is asked for."""
        return self._listing

    @cached_property
    def unwritable(self) -> str | None:
        """Nobody labels in a page that was saved."""
        return NOT_SAVED

    def ask(self, *names: str, **given: Any) -> dict[str, Any]:
        """The answers to questions of these names, as a page holds them."""
        query = Query({name: str(value) for name, value in given.items()})
        number = f" {given['number']}" if "number" in given else ""
        return {f"{name}{number}": json.loads(QUESTIONS[name](self, query).body) for name in names}


def archive_at(storage: Storage, head: Commit) -> Archive:
    """The archive of a commit, read only; NotFoundError where there is none any more."""
    from archive import Archive

    found = about.find(storage)
    if found is None:
        raise NotFoundError(f"there is no archive at {storage.url} any more")
    return Archive(storage, *found, head, pinned=True, single_writer=False)


def _at(page: str, **given: Any) -> str:
    return f"#/{page}?{urlencode(given)}"


# -- an episode --------------------------------------------------------------------------------------------------------


def episode(ep: Episode, some: Any, selected: Any, tokenizer: Any, max_bytes: int | None) -> str:
    """The page of one episode, `some` of which it is alone, with these fields.

    What `max_bytes` leaves no room for is named there; UsageError if not even that fits.
    """
    decode = decoder(tokenizer)
    shown = Still(some, tokenizer)
    told = shown.ask("about", "episode", "neighbours", "labels", id=ep.id)
    data = dict(frames.leaves(ep.read(selected)))
    free = {path for path, kind in ep.fields.items() if kind.rpartition(" ")[2] == "free"}
    whole = {path: leaf for path, leaf in data.items() if path in free}
    leaves = {path: leaf for path, leaf in data.items() if path not in free}
    found = rollouts.find(leaves, whole, ep.metadata, ep.length)
    derived = returns_of(ep, GAMMA) if REWARD in leaves else {}
    parts = list(_parts(leaves, found, derived, ep.length, decode))
    kinds = {part.path: {"films": "frames", "curves": "curve"}.get(part.kind, "raw") for part in parts}
    kinds |= dict.fromkeys([*found.paths, *(track.path for track in found.tracks)] if found else [], "tokens")
    fields = [one | {"kind": kinds.get(one["name"], "raw")} for one in told["episode"]["fields"] if one["name"] in data]
    fields.sort(key=lambda one: one["kind"] == "frames")  # numbers of pictures are not on the page
    told["episode"] |= {"fields": fields, "whole": {path: _in_words(leaf) for path, leaf in whole.items()}}

    def made(held: dict[str, Any], left_out: list[str]) -> str:
        rollout = held.pop("rollout", None)
        left = {"why": _why_left_out(max_bytes), "what": left_out} if left_out else None
        replies = {**told, "episode": told["episode"] | {"left_out": left}, "rollout": rollout, "group": None}
        return _page(str(ep.id), _at("episode", id=ep.id), ("episode",), replies, gamma=GAMMA, **held)

    return _within(parts, made, max_bytes, ep.id)


def _in_words(leaf: Any) -> str:
    """A value of the whole episode, as people read it."""
    several = texts.as_texts(leaf) if isinstance(leaf, Ragged) else None
    return texts.readable(leaf) if several is None else "\n".join(several.steps)


def _page(title: str, at: str, pages: Sequence[str], replies: Mapping[str, Any], **held: Any) -> str:
    """The page that begins there, has these pages of the viewer, and these answers."""
    known = replies["about"]
    about = known | {"pinned": True, "newest": known["commit"]}
    return bundle.page(title, {"at": at, "pages": pages, "answers": {**replies, "about": about}, **held})


# -- tables of episodes ------------------------------------------------------------------------------------------------


def episodes(found: Episodes, title: str) -> str:
    """The page of some episodes: a row for each, to be sorted and filtered, and how they are spread."""
    shown = Still(found)
    replies = shown.ask("about", "labels", "trend", column="return")
    return _page(title, "#/episodes", _TABLES, replies, **table_of(shown.listing(Query({}))))


def archive(found: Episodes, runs: Sequence[str], title: str) -> str:
    """The page of an archive, or of some of its runs side by side: checkpoints, returns, and a row for each episode."""
    shown = Still(found)
    replies = shown.ask("about", "labels", "trend", "checkpoints", column="return")
    replies["checkpoints"] = [one for one in replies["checkpoints"] if one["run"] in runs]
    replies["about"] |= {"runs": list(runs)}
    newest = {one["run"]: one["commit"] for one in replies["checkpoints"]}
    for number in sorted(newest.values())[-MOST_DETAILS:]:
        replies |= shown.ask("checkpoint", number=number)
    replies["tails"] = None
    at = "#/compare" if len(runs) > 1 else "#/episodes"
    return _page(title, at, (*_TABLES, "checkpoints"), replies, **table_of(shown.listing(Query({}))))


def checkpoint(ck: Checkpoint, found: Plan | None = None) -> str:
    """The page of a checkpoint: ranks, buffers and its episodes; with a plan, who gets what of it."""
    shown = Still(ck.episodes)
    replies = shown.ask("about", "labels", "trend", "checkpoints", column="return", run=ck.run)
    replies |= shown.ask("checkpoint", number=ck.number)
    if found is not None:
        replies[f"plan {ck.number}"] = json.loads(told_of(found).body)
    replies["tails"] = None  # what was journaled since is no part of it
    title = f"{ck.name} of run {ck.run}" if found is None else f"{ck.name}: {ck.world_size} ranks to {found.world_size}"
    given = {} if found is None else {"ranks": found.world_size}
    at = _at("checkpoints", run=ck.run, number=ck.number, **given)
    return _page(title, at, ("checkpoints", *_TABLES), replies, **table_of(shown.listing(Query({}))))


def table_of(listing: Listing) -> dict[str, Any]:
    """The rows of the newest episodes, as many as there is room for."""
    names = [name for name in listing.names if name != "metadata"] + listing.metadata_names[:MOST_METADATA]
    count, most = len(listing), MAX_ROWS
    packed = _packed(listing, names, most)
    while len(packed) > MAX_BYTES and most > 1:
        most = int(min(most, count) * MAX_BYTES / len(packed) * 0.95) or 1
        packed = _packed(listing, names, most)
    left = f"the newest {most} of {count}: filter() chooses others" if count > most else ""
    return {"table": packed, "left": left}


def _packed(listing: Listing, names: Sequence[str], most: int) -> str:
    places = pa.array(np.arange(max(0, len(listing) - most), len(listing)))
    table = pa.table({name: listing.values(name, places) for name in names})
    return base64.b64encode(zlib.compress(arrow_reply(table).body, 6)).decode()


# -- what is on screen ------------------------------------------------------------------------------------------------


def page(shown: Shown, query: Query) -> Reply:
    """The page of `what=`: "episode" `id=`, the "episodes" that are meant, "checkpoint" `number=`, its "plan" for
    `ranks=`, or the whole "archive"; X-Name: of the file. As bytes: it is saved, never shown from here."""
    make = _PAGES.get(query.text("what"))
    if make is None:
        raise UsageError(f"what={query.text('what')!r:.40} is no page: {', '.join(_PAGES)}")
    return bytes_reply(make(shown, query).encode(), Name=f"archive-{query.text('what')}.html")


def _episode_asked(shown: Shown, query: Query) -> str:
    return shown.listing(query).episodes[query.needed("id")].to_html()


def _episodes_asked(shown: Shown, query: Query) -> str:
    scope = shown.scope(query)
    return scope.listing.episodes.pick(scope.places).to_html(query.text("where") or "Episodes")


def _checkpoint_asked(shown: Shown, query: Query) -> str:
    return checkpoint_at(shown.at(query), query.number("number", 0)).to_html()


def _plan_asked(shown: Shown, query: Query) -> str:
    return planned(shown, query).to_html()


def _archive_asked(shown: Shown, query: Query) -> str:
    return shown.at(query).to_html()


_PAGES: dict[str, Callable[[Shown, Query], str]] = {
    "episode": _episode_asked,
    "episodes": _episodes_asked,
    "checkpoint": _checkpoint_asked,
    "plan": _plan_asked,
    "archive": _archive_asked,
}
