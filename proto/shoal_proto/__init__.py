"""Messages and errors that travel between the parts of Shoal."""

from shoal_proto.forks import grpc

grpc.prepare()

MAX_PIECE_BYTES = 4 * 1024 * 1024
# A message contains one piece and its framing.
MAX_MESSAGE_BYTES = MAX_PIECE_BYTES + 1024 * 1024
# A shard map of many parameters is larger than any request.
MAX_ANSWER_BYTES = 64 * 1024 * 1024
CHUNK_BYTES = 8 * 1024 * 1024
"""Size of a chunk of published weights; the last chunk of a segment may be shorter."""
