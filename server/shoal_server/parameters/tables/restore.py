"""From an image back to a shard of its kind."""

from shoal_proto.errors import MalformedMessage
from shoal_server.parameters.shard.dense import DenseBody, dense_from_image
from shoal_server.parameters.shard.image import Image
from shoal_server.parameters.shard.versioned import AnyShard
from shoal_server.parameters.tables.shard import TableBody, table_from_image


def restore(image: Image) -> AnyShard:
    """The shard that the image is of; it takes the image's tensors over.

    Raises MalformedMessage for an image of an unknown kind, or one that does not fit together.
    """
    if image.kind == DenseBody.kind:
        return dense_from_image(image)
    if image.kind == TableBody.kind:
        return table_from_image(image)
    raise MalformedMessage(
        f"shard {image.shard_id} is of a kind unknown to this server",
        seen=repr(image.kind),
        expected="dense or table",
        fix="Run the same version of Shoal on every server.",
    )
