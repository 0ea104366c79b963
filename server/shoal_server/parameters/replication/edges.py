"""The edges of the replication core, and the choice of an effect's edge."""

from dataclasses import dataclass
from typing import Protocol, assert_never

from shoal_server.core.replication.protocol import effects as fx
from shoal_server.core.replication.protocol.messages import ImageChunk, ImageStart, UpdateMessage
from shoal_server.parameters.replication.acknowledgements import Acknowledgements
from shoal_server.parameters.replication.incoming_images import IncomingImages
from shoal_server.parameters.replication.outgoing_links import OutgoingLinks
from shoal_server.parameters.replication.received_updates import ReceivedUpdates
from shoal_server.parameters.replication.record_writer import RecordWriter
from shoal_server.parameters.replication.replication_servicer import ReplicationServicer
from shoal_server.parameters.replication.shard_roles import ShardRoles
from shoal_server.parameters.replication.wire.frames import ArrivedRequest


class Observer(Protocol):
    """Probes servers and writes log lines."""

    def probe_peer(self, effect: fx.ProbePeer) -> None: ...

    def log_line(self, effect: fx.LogLine) -> None: ...


@dataclass(kw_only=True)
class ReplicationEdges:
    """All edges of one core. Their methods return at once; the result of longer work is an
    event."""

    links: OutgoingLinks
    received: ReceivedUpdates
    images: IncomingImages
    roles: ShardRoles
    acknowledgements: Acknowledgements
    writer: RecordWriter
    observer: Observer
    servicer: ReplicationServicer | None = None
    """None until the service is made. No request arrives before that."""

    def carry_out(self, effect: fx.Effect) -> None:  # noqa: PLR0912, PLR0915 - a case per effect
        match effect:
            # The effects of a push come first, as cases are tried in order.
            case fx.SendRequest():
                self.links.send_request(effect)
            case fx.SendReply():
                assert self.servicer is not None, "it received the request"
                self.servicer.send_reply(effect)
            case fx.AcceptRequest():
                self._accept_request(effect)
            case fx.AcknowledgeVersion():
                self.acknowledgements.acknowledge_version(effect)
            case fx.SetUnreplicated():
                self.roles.set_unreplicated(effect)
            case fx.SetFollowers():
                self.roles.set_followers(effect)
            case fx.SetLease():
                self.acknowledgements.set_lease(effect)
            case fx.RefuseVersion():
                self.acknowledgements.refuse_version(effect)
            case fx.WriteShardRecord():
                self.writer.write_shard_record(effect)
            case fx.ReviseShardRecord():
                self.writer.revise_shard_record(effect)
            case fx.RefreshShardRecord():
                self.writer.refresh_shard_record(effect)
            case fx.OpenLink():
                self.links.open_link(effect)
            case fx.CloseLink():
                self.links.close_link(effect)
            case fx.MakeImage():
                self.links.make_image(effect)
            case fx.ReleaseChunks():
                self.links.release_chunks(effect)
            case fx.CloseImage():
                self.links.close_image(effect)
            case fx.DropImage():
                self.images.drop_image(effect)
            case fx.SettleCopy():
                self.received.settle_copy(effect)
            case fx.LeadShard():
                self.roles.lead_shard(effect)
            case fx.OpenShard():
                self.roles.open_shard(effect)
            case fx.StopPushes():
                self.roles.stop_pushes(effect)
            case fx.ResumePushes():
                self.roles.resume_pushes(effect)
            case fx.StepDown():
                self.roles.step_down(effect)
            case fx.DropShard():
                self.roles.drop_shard(effect)
            case fx.AdoptImage():
                self.roles.adopt_image(effect)
            case fx.EnterEpoch():
                self.roles.enter_epoch(effect)
            case fx.LoadJournal():
                self.roles.load_journal(effect)
            case fx.ProbePeer():
                self.observer.probe_peer(effect)
            case fx.LogLine():
                self.observer.log_line(effect)
            case _:
                assert_never(effect)

    def _accept_request(self, effect: fx.AcceptRequest) -> None:
        arrived = effect.data
        assert isinstance(arrived, ArrivedRequest)
        match effect.request:
            case UpdateMessage():
                self.received.replay_record(effect.request.key, arrived)
            case ImageChunk():
                self.images.store_chunk(effect.request, arrived)
            case ImageStart():
                self.images.begin_image(effect.request, arrived)
            case _:
                assert_never(effect.request)
