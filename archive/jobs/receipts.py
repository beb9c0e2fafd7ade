"""Results of batches: packed by the worker that made them, created once, and read back by whoever commits them."""

from __future__ import annotations

import json
import math
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from archive.base import AlreadyExistsError, CorruptStateError, MissingObjectError, layout
from archive.fields import Array
from archive.jobs.records import ArrayForm, ReceiptIndex, ResultKind
from archive.saved import WholeObject, pack
from archive.shard import file_member
from archive.store import Storage, smallfiles

if TYPE_CHECKING:
    import pyarrow as pa

Items = Sequence[Any]  # of a batch
Agree = Callable[[str], str]


@dataclass(frozen=True)
class Result:
    """The result of a batch: rows of tables, arrays by path, and what else its kind of job says, as JSON.

    steps: how many it has values for.  failed: a pair (episode id, error) for each at which the function failed.
    seconds: how long it took, by part.
    """

    tables: Mapping[str, pa.Table] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)
    said: Any = None
    steps: int = 0
    failed: Sequence[tuple[str, str]] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)


class Procedure(ABC):
    """A kind of work, done batch by batch, on any worker. It pickles."""

    def prepare(self, items: Items) -> Any:
        """The input of `run` for a batch of these items, such as what is read for it: made while the batch before is
        run, one at a time."""
        return items

    @abstractmethod
    def run(self, prepared: Any, agree: Agree) -> Result:
        """The result of a batch: always called by one and the same thread of a worker. agree: gives the kind of results
        that all batches of the job have, from the one of this batch; the first one counts."""


class Receipt(WholeObject[ReceiptIndex]):
    """The result of a batch, from all its bytes."""

    def __init__(self, data: bytes, key: str, where: str) -> None:
        try:
            super().__init__(ReceiptIndex, data, key, where)
        except CorruptStateError as e:
            remedy = ReceiptIndex.REMEDY
            raise e if remedy in str(e) else CorruptStateError(f"{e}; {remedy}") from e

    def values(self, name: str, count: int) -> Array:
        """An array of so many rows; CorruptStateError, before memory is made for it, if it has others."""
        form = self.index.arrays.get(name)
        (data,) = self.files([name]) if form is not None else (b"",)
        if form is not None and form.shape[:1] == (count,):
            with suppress(ValueError, TypeError):
                if form.dtype == "O":
                    texts = json.loads(data)
                    if all(isinstance(one, str) for one in texts) and len(texts) == math.prod(form.shape):
                        return np.array(texts, object).reshape(form.shape)
                dtype = np.dtype(form.dtype)
                if dtype.kind in "biufc" and len(data) == dtype.itemsize * math.prod(form.shape):
                    return np.frombuffer(data, dtype).reshape(form.shape)
        raise CorruptStateError(f"{self.where} has no array {name!r:.80} of {count} rows; {self.damage}")

    @property
    def failed(self) -> pa.Table:
        """Rows of the failed table: the episodes at which the function failed."""
        return self.table("failed")


@dataclass(frozen=True)
class Receipts:
    """The results of one round's batches: objects of a job or, for a call without a job's name, values."""

    storage: Storage
    job: str
    session: str
    function: str | None
    round: int | None  # None: values

    def has(self, number: int) -> bool:
        """True if a batch has a result on the store."""
        return self.round is not None and self.storage.exists(layout.batch_key(self.job, number))

    def put(self, number: int, items: int, result: Result) -> tuple[bool, bytes | None]:
        """Create the result of a batch, or give it; True unless that of another worker was there first, which then
        counts."""
        import pyarrow as pa

        index = ReceiptIndex(
            self.job, number, self.session, uuid.uuid4().hex, self.function, items, result.steps, len(result.failed),
            result.seconds, {name: _form(one) for name, one in result.arrays.items()}, result.said,
        )  # fmt: skip
        rows = {kind: table for kind, table in result.tables.items() if table.num_rows}
        if result.failed:
            names, errors = zip(*result.failed, strict=True)
            rows["failed"] = pa.table({"batch": [number] * len(names), "episode_id": names, "error": errors})
        buffers = pack(index, rows, [file_member(name, _bytes(array)) for name, array in result.arrays.items()])[0]
        if self.round is None:
            return True, b"".join(buffers)
        try:
            self.storage.create_once(index.key, buffers)
        except AlreadyExistsError:
            return False, None
        return True, None

    def agree(self, kind: str) -> str:
        """The kind of results that the job has: this one, if it is the first."""
        if self.round is None:
            return kind
        key = layout.job_key(self.job, f"kind-{self.round:06d}.json")
        try:
            return smallfiles.read_small(self.storage, key, ResultKind, CorruptStateError).kind
        except MissingObjectError:
            first = smallfiles.create_small(self.storage, key, ResultKind(kind))
        return kind if first else self.agree(kind)

    def read(self, numbers: Sequence[int]) -> list[Receipt]:
        """The results of batches, each checked to the last byte."""
        keys = [layout.batch_key(self.job, number) for number in numbers]
        found = zip(keys, self.storage.get_all(keys), strict=True)
        return [Receipt(data, key, self.storage.full_url(key)) for key, data in found]


def _form(array: Array) -> ArrayForm:
    return ArrayForm("O" if array.dtype == object else array.dtype.newbyteorder("<").str, array.shape)


def _bytes(array: Array) -> bytes:
    if array.dtype == object:
        return json.dumps(array.reshape(-1).tolist()).encode()
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()


@dataclass(frozen=True)
class Done:
    """A batch that a worker is through with. made: it is this worker's result. error: the reason why there is none."""

    number: int
    made: bool = False
    items: int = 0
    steps: int = 0
    failed: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    data: bytes | None = None
    error: BaseException | None = None


class Worker:
    """A worker: runs batches of one procedure, one after the other, and prepares the next one meanwhile. It pickles."""

    def __init__(self, procedure: Procedure, receipts: Receipts) -> None:
        self.procedure = procedure
        self.receipts = receipts
        self._agreed: str | None = None
        self._shares = False  # another driver's worker has made a result that this one was to make

    def prepare(self, number: int, items: Items) -> Any:
        """The input of `run`: a Done if the batch has a result already, or nothing can be read for it."""
        try:
            if not self.receipts.has(number):
                return self.procedure.prepare(items)
            self._shares = True
            return Done(number)
        except Exception as error:
            return Done(number, error=error)

    def run(self, number: int, items: Items, prepared: Any) -> Done:
        """Make a batch's result, unless there is one. Errors are part of what is returned."""
        if isinstance(prepared, Done):
            return prepared
        try:
            if self._shares and self.receipts.has(number):  # since it was prepared
                return Done(number)
            result = self.procedure.run(prepared, self._agree)
            began = perf_counter()
            made, data = self.receipts.put(number, len(items), result)
            self._shares |= not made
            seconds = {**result.seconds, "written": perf_counter() - began}
            return Done(number, made, len(items), result.steps, len(result.failed), seconds, data)
        except Exception as error:
            return Done(number, error=error)

    def _agree(self, kind: str) -> str:
        if self._agreed is None:
            self._agreed = self.receipts.agree(kind)
        return self._agreed
