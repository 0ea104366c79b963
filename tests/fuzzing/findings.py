"""Counters of a run of the fuzzer, and the inputs that found something."""

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True, kw_only=True)
class Input:
    """An input of one surface: its target (a call, a kind of file), and its bytes."""

    surface: str
    to: str
    parts: Sequence[bytes]

    def to_json(self) -> str:
        parts = [base64.b64encode(part).decode() for part in self.parts]
        return json.dumps({"surface": self.surface, "to": self.to, "parts": parts}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Input":
        found = json.loads(text)
        parts = [base64.b64decode(part) for part in found["parts"]]
        return cls(surface=found["surface"], to=found["to"], parts=parts)


@dataclass
class Findings:
    """Findings of one run."""

    num_inputs: Counter[str] = field(default_factory=Counter)
    """Number of inputs by surface."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Number of answers by surface and outcome."""
    unhandled: list[tuple[Input | None, str]] = field(default_factory=list)
    """Errors that no code handles, each with its input if known."""

    def note(self, sent: Input, outcome: str) -> None:
        self.num_inputs[sent.surface] += 1
        self.outcomes[f"{sent.surface}: {outcome}"] += 1

    def found(self, sent: Input | None, what: str) -> None:
        self.unhandled.append((sent, what))

    def keep(self, directory: Path) -> None:
        """Write the findings whose input is known, to be replayed."""
        for sent, what in self.unhandled:
            if sent is None:
                continue
            text = sent.to_json()
            name = hashlib.sha256(text.encode()).hexdigest()[:12]
            directory.mkdir(parents=True, exist_ok=True)
            (directory / f"{sent.surface}-{name}.json").write_text(text)
            print(f"{sent.surface}-{name}: {what[:300]}")


def corpus(surface: str) -> Iterator[Input]:
    """Inputs of earlier findings."""
    for path in sorted(CORPUS.glob(f"{surface}-*.json")):
        yield Input.from_json(path.read_text())
