"""Links of one process to other servers, their messages, and probes of peers."""

from collections.abc import Callable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any

from support.sim.replication.links import SILENCE_S, End, Link
from support.sim.replication.setting import Setting

from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol import effects as fx
from shoal_server.core.replication.protocol import events as ev
from shoal_server.core.replication.protocol.messages import (
    BackupState,
    ChunkReceived,
    CopyUpToDate,
    ImageChunk,
    ImageStart,
    Key,
    Reply,
    UpdateMessage,
)
from shoal_server.etcd import keys
from shoal_server.etcd.records.servers import parse

if TYPE_CHECKING:
    from support.sim.replication.server import SimServer

ANSWERS_WITHIN_S = SILENCE_S / 2
HELLO, WELCOME = "hello", "welcome"


class ServerPeers:
    def __init__(self, server: "SimServer", setting: Setting) -> None:
        self._server = server
        self._setting = setting
        self._opened: dict[tuple[Holder, int], tuple[Link, End]] = {}
        """Links opened by this process, by peer and number."""
        self._accepted: dict[tuple[Holder, int], tuple[Link, End]] = {}
        self._sent: dict[tuple[Holder, int, Key], int] = {}
        """Version of the last record that was sent, or that records are to follow."""
        self.handlers: Mapping[type, Callable[[Any], None]] = {
            fx.OpenLink: self._open,
            fx.CloseLink: self._close,
            fx.SendRequest: self._send,
            fx.SendReply: self._answer,
            fx.ProbePeer: self._probe,
        }

    @property
    def links(self) -> list[Link]:
        return [link for link, _ in [*self._opened.values(), *self._accepted.values()]]

    def died(self) -> None:
        for link, end in [*self._opened.values(), *self._accepted.values()]:
            link.process_died(end)

    def _find(self, peer: Holder) -> "SimServer | None":
        """Return the peer's process if it runs, else None."""
        server = self._setting.servers.get(peer)
        return server if server is not None and server.process.alive else None

    def _is_replaced(self, peer: Holder) -> bool:
        """True if etcd lists another process under the peer's id."""
        value = self._setting.store.listed().get(peer.server_id)
        listed = value and parse(keys.server(peer.server_id), value).holder
        return bool(listed) and listed != peer

    # --- links from here ---

    def _open(self, effect: fx.OpenLink) -> None:
        self._server.process.act(0.002, lambda: self._connect(effect.peer, effect.link))

    def _connect(self, peer: Holder, number: int) -> None:
        setting, name = self._setting, self._server.process.name
        other = self._find(peer)
        is_cut = setting.network.is_cut(name, f"{peer.server_id}#{peer.incarnation}")
        if other is None or self._is_replaced(peer):
            is_gone = setting.chance.random() < 0.9
            within_s = 0.01 if is_gone else SILENCE_S
            broke = ev.LinkBroken(peer, number, is_gone)
            self._server.process.act(within_s, lambda: self._server.submit_event(broke))
            return
        if is_cut:
            broke = ev.LinkBroken(peer, number, is_gone=False)
            self._server.process.act(SILENCE_S, lambda: self._server.submit_event(broke))
            return
        me = self._server.me

        def received(message: object) -> None:
            if message == WELCOME:
                self._server.submit_event(ev.LinkOpened(peer, number))
            else:
                self._receive_reply(peer, number, message)  # type: ignore[arg-type]

        def broken() -> None:
            if self._opened.pop((peer, number), None) is not None:
                self._server.submit_event(ev.LinkBroken(peer, number, False, near.has_replied))

        def left() -> None:
            other.peers.caller_left(me, number)

        near = End(self._server.process, received, broken)
        far = End(other.process, lambda m: other.peers.receive(me, number, m), left)
        is_local = setting.chance.random() < 0.6
        link = Link(setting.clock, setting.network, near, far, is_local=is_local)
        if other.process.paused_since_s is not None:
            link.troubled()
        self._opened[peer, number] = link, near
        other.peers.accept(me, number, link, far)
        link.send(near, HELLO)

    def _close(self, effect: fx.CloseLink) -> None:
        found = self._opened.pop((effect.peer, effect.link), None)
        if found is not None:
            found[0].close(found[1])

    def _send(self, effect: fx.SendRequest) -> None:
        found = self._opened.get((effect.peer, effect.link))
        assert found is not None, f"{effect} over a link that is not there"
        link, end = found
        self._check_order(effect)
        request = effect.request
        is_held = link.send(end, (request, self._data_of(effect)))
        if is_held and isinstance(request, UpdateMessage):
            held = ev.RecordDelivered(
                effect.peer, effect.link, request.key, request.epoch, request.version
            )
            self._server.process.act(0.0, lambda: self._server.submit_event(held))

    def _check_order(self, effect: fx.SendRequest) -> None:
        """Check that records follow an image or a copy without a gap."""
        request, place = effect.request, (effect.peer, effect.link, effect.request.key)
        if isinstance(request, CopyUpToDate | ImageStart):
            self._sent[place] = request.version
        elif isinstance(request, UpdateMessage):
            assert effect.record is not None and effect.record.version == request.version, effect
            self._sent[place] += 1
            assert request.version == self._sent[place], f"{effect} is sent after a gap"

    def _data_of(self, effect: fx.SendRequest) -> Any:
        request = effect.request
        if isinstance(request, ImageChunk):
            self._setting.ledger.chunk_sent(self._server.me, request.image, request.index)
            return self._server.copies.images[request.image].chunk(request.index)
        return effect.record

    def _receive_reply(self, peer: Holder, number: int, reply: Reply) -> None:
        ledger = self._setting.ledger
        if isinstance(reply, ChunkReceived):
            ledger.chunk_taken(self._server.me, reply.image, reply.next_chunk)
        if isinstance(reply, BackupState) and reply.image:
            ledger.chunk_taken(self._server.me, reply.image, reply.next_chunk)
        self._server.submit_event(ev.ReplyReceived(peer, number, reply))

    # --- links to here ---

    def accept(self, peer: Holder, number: int, link: Link, end: End) -> None:
        self._accepted[peer, number] = link, end

    def receive(self, peer: Holder, number: int, message: Any) -> None:
        if message == HELLO:
            self.read_to_end(peer, before=number)
            self._server.submit_event(ev.IncomingLinkOpened(peer, number))
            link, end = self._accepted[peer, number]
            link.send(end, WELCOME)
            return
        request, data = message
        self._server.submit_event(ev.RequestReceived(peer, number, request, data))

    def read_to_end(self, peer: Holder, before: float = inf) -> None:
        """Read all that the peer has sent over links of lower numbers, and close these links."""
        for (caller, number), (link, end) in list(self._accepted.items()):
            if caller == peer and number < before:
                link.read_to_end(end)

    def unread(self, key: Key, epoch: int) -> Mapping[int, Any]:
        """Return updates, by version, that are in this process's memory and not read yet."""
        return {
            message[0].version: message[1].update
            for link, end in self._accepted.values()
            if link.is_local and end.is_open
            for message in end.coming
            if isinstance(message, tuple) and isinstance(message[0], UpdateMessage)
            if (message[0].key, message[0].epoch) == (key, epoch)
        }

    def caller_left(self, peer: Holder, number: int) -> None:
        if self._accepted.pop((peer, number), None) is not None:
            self._server.submit_event(ev.IncomingLinkEnded(peer, number))

    def _answer(self, effect: fx.SendReply) -> None:
        found = self._accepted.get((effect.peer, effect.link))
        if found is not None:  # Otherwise the caller has left.
            found[0].send(found[1], effect.reply)

    # --- probes ---

    def _probe(self, effect: fx.ProbePeer) -> None:
        peer, setting = effect.peer, self._setting
        me = self._server.process
        name = f"{peer.server_id}#{peer.incarnation}"

        def answered(answers: bool) -> None:
            self._server.submit_event(ev.PeerProbed(peer, answers))

        def ask() -> None:
            other = self._find(peer)
            if other is None or self._is_replaced(peer):
                me.act(0.01, lambda: answered(False))
            elif setting.network.is_cut(me.name, name) or other.process.paused_since_s is not None:
                me.act(ANSWERS_WITHIN_S, lambda: answered(False))
            else:
                delay_s = setting.network.delay_s(me.name, name)
                me.act(delay_s, lambda: answered(True))

        me.act(setting.network.delay_s(me.name, name), ask)
