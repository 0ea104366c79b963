"""Stores in memory that watch or fail transactions, as etcd and the network do."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from support.clusters.memory_store import MemoryStore

from shoal_proto.errors import Unavailable
from shoal_server.etcd.api import Compare, Operation, Put, TransactionResult


class Transaction(NamedTuple):
    compares: Sequence[Compare]
    then: Sequence[Operation]
    otherwise: Sequence[Operation]

    @property
    def puts(self) -> list[Put]:
        return [each for each in self.then if isinstance(each, Put)]


class HookedStore(MemoryStore):
    """A store with methods that run before and after each transaction. If one raises, the caller
    gets the error; after `before` the transaction has not taken effect, after `after` it has."""

    async def transact(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
    ) -> TransactionResult:
        transaction = Transaction(compares, then, otherwise)
        await self.before(transaction)
        result = await super().transact(compares, then, otherwise)
        self.after(transaction, result)
        return result

    async def before(self, transaction: Transaction) -> None:
        pass

    def after(self, transaction: Transaction, result: TransactionResult) -> None:
        pass


def answer_lost() -> Unavailable:
    """Return the error of a caller that does not know if its transaction took effect."""
    return Unavailable("the answer was lost", details={"outcome": "unknown"})


class UnreliableStore(HookedStore):
    """A store that fails the transactions that `concerns` chooses, while `fails` says so."""

    def __init__(self, concerns: Callable[[Transaction], bool], *, once: bool = False) -> None:
        super().__init__()
        self._concerns = concerns
        self._once = once
        self.fails = ""
        """"before" or "after" the transaction takes effect; empty: not at all. If `once`, only the
        next failure after it takes effect."""

    async def before(self, transaction: Transaction) -> None:
        if self.fails == "before" and self._concerns(transaction):
            raise Unavailable("etcd is away")

    def after(self, transaction: Transaction, result: TransactionResult) -> None:
        if self.fails == "after" and self._concerns(transaction):
            if self._once:
                self.fails = ""
            raise answer_lost()
