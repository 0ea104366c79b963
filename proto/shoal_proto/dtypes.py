"""Element types that parameters and rows may have on parameter servers, by torch's names."""

from collections.abc import Mapping

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
