#!/usr/bin/env bash
# Writes the Python modules of every .proto file beside it: messages, type stubs, gRPC stubs.
# With --check, fails if what is committed differs from what the .proto files say.
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-../.venv/bin/python}
bin=$(cd "$(dirname "$(command -v "$python")")" && pwd)
out=.
if [ "${1:-}" = --check ]; then
    out=$(mktemp -d)
    trap 'rm -rf "$out"' EXIT
fi
mapfile -t protos < <(find shoal_proto -name '*.proto' | sort)
PATH=$bin:$PATH "$python" -m grpc_tools.protoc -I . \
    --python_out="$out" --grpc_python_out="$out" --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" \
    "${protos[@]}"
# Files without a service get an empty gRPC module: not worth keeping.
find "$out/shoal_proto" -name '*_pb2_grpc.py*' | while read -r file; do
    grep -q Stub "$file" || rm "$file"
done
if [ "$out" != . ]; then
    status=0
    for file in $(cd "$out" && find . -name '*_pb2*.py*') $(find . -name '*_pb2*.py' -o -name '*_pb2*.pyi'); do
        cmp -s "$out/$file" "$file" || { echo "differs from its .proto: proto/$file (run make proto)"; status=1; }
    done
    exit $status
fi
