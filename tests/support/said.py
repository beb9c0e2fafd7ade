"""What somebody was told is done: in a file, so that it outlives the process that was told."""

from __future__ import annotations

from pathlib import Path


class Said:
    """Words, each written down once something is acknowledged."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, word: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{word}\n")

    def __contains__(self, word: str) -> bool:
        return word in self.words

    @property
    def words(self) -> list[str]:
        """All of them, in the order in which they were said."""
        return self._path.read_text().split() if self._path.exists() else []

    @property
    def folder(self) -> Path:
        """Where its file lies."""
        return self._path.parent
