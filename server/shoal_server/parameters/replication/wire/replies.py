"""Encoding and decoding of backups' replies."""

from shoal_proto.errors import MalformedMessage
from shoal_proto.v1 import replication_pb2 as pb
from shoal_server.core.replication.protocol.messages import (
    BackupRefusalReason,
    BackupRefused,
    BackupState,
    ChunkReceived,
    ImageInstalled,
    RecordsReceived,
    Reply,
)

_REASONS = {
    BackupRefusalReason.OTHER_HOLDERS: pb.RefusalReason.REFUSAL_REASON_OTHER_HOLDERS,
    BackupRefusalReason.FULL: pb.RefusalReason.REFUSAL_REASON_FULL,
    BackupRefusalReason.NO_COPY: pb.RefusalReason.REFUSAL_REASON_NO_COPY,
    BackupRefusalReason.FAILED: pb.RefusalReason.REFUSAL_REASON_FAILED,
}
_WHY = {number: why for why, number in _REASONS.items()}


def encode(reply: Reply) -> pb.FollowReply:
    job, shard_id = reply.key
    message = pb.FollowReply(job=job, shard_id=shard_id)
    if not isinstance(reply, ChunkReceived):
        message.epoch = reply.epoch
    match reply:
        case RecordsReceived():
            message.received = reply.version
        case BackupState():
            message.holds.CopyFrom(
                pb.Holds(
                    version=reply.version,
                    copy_epoch=reply.copy_epoch,
                    born=reply.born,
                    image=reply.image,
                    next_chunk=reply.next_chunk,
                )
            )
        case ImageInstalled():
            message.installed.CopyFrom(pb.Installed(image=reply.image, version=reply.version))
        case ChunkReceived():
            message.taken.CopyFrom(pb.ChunkTaken(image=reply.image, next_chunk=reply.next_chunk))
        case BackupRefused():
            reason = _REASONS[reply.why]
            message.refused.CopyFrom(
                pb.Refused(reason=reason, detail=reply.detail, newest_epoch=reply.newest_epoch)
            )
    return message


def decode(message: pb.FollowReply) -> Reply:
    """Decode a reply. Raises MalformedMessage for an unknown one."""
    key = message.job, message.shard_id
    match message.WhichOneof("answer"):
        case "received":
            return RecordsReceived(key, message.epoch, message.received)
        case "holds":
            holds = message.holds
            return BackupState(
                key,
                message.epoch,
                holds.copy_epoch,
                holds.born,
                holds.version,
                holds.image,
                holds.next_chunk,
            )
        case "installed":
            installed = message.installed
            return ImageInstalled(key, message.epoch, installed.image, installed.version)
        case "taken":
            return ChunkReceived(key, message.taken.image, message.taken.next_chunk)
        case "refused":
            refused = message.refused
            why = _WHY.get(refused.reason, BackupRefusalReason.FAILED)
            return BackupRefused(key, message.epoch, why, refused.detail, refused.newest_epoch)
        case other:
            raise MalformedMessage(
                "a backup sent a reply that this release does not know", seen=str(other)
            )
