"""Restoration of a shard of any kind from its image."""

from google.protobuf.message import DecodeError

from shoal_proto.errors import MalformedMessage, RetryError, ShoalError
from shoal_server.parameters.images.image import LoadedImage
from shoal_server.parameters.shard.dense import DenseBody, dense_from_image
from shoal_server.parameters.shard.versioned import AnyShard
from shoal_server.parameters.tables.shard import TableBody, table_from_image

_BAD_DATA_ERRORS = (
    *(ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError, OverflowError),
    DecodeError,
)


def restore(image: LoadedImage) -> AnyShard:
    """Restore the shard of an image, and take ownership of the image's tensors. Raises
    MalformedMessage if the image is inconsistent: a right checksum does not prove that this program
    wrote it."""
    try:
        if image.kind == DenseBody.kind:
            return dense_from_image(image)
        if image.kind == TableBody.kind:
            return table_from_image(image)
    except RetryError:
        raise
    except (ShoalError, *_BAD_DATA_ERRORS) as error:
        raise MalformedMessage(
            f"the image of shard {image.shard_id} holds no shard",
            seen=(str(error) if isinstance(error, ShoalError) else repr(error))[:300],
            expected="tensors and metadata that fit together",
        ) from error
    raise MalformedMessage(
        f"shard {image.shard_id} is of a kind unknown to this server",
        seen=repr(image.kind),
        expected="dense or table",
        fix="Run the same version of Shoal on every server.",
    )
