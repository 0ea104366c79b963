"""The reference pages, made from the source: only headings are written by hand."""

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
STUB = ROOT / "worker" / "shoal" / "__init__.pyi"
GROUPS = {
    "A session": ("join", "Session", "Batch", "Drained"),
    "Synchronous strategies": (
        *("DDP", "Zero1", "Zero2", "Zero3", "FSDP", "HSDP"),
        *("TensorParallel", "FSDPTensor", "Pipeline", "Hybrid", "LocalSGD", "DiLoCo"),
    ),
    "Asynchronous strategies": ("AsyncSGD", "SSP", "BSP", "AsyncDiLoCo"),
    "Checkpoints and data": ("Checkpoints", "Shards"),
    "Embedding tables": (
        *("EmbeddingTable", "EmbeddingBagTable", "RowSGD", "RowAdagrad", "RowAdam"),
        *("RowNormal", "RowUniform", "RowConstant", "Admission", "Eviction"),
    ),
    "Published weights": (
        "subscribe",
        "Subscription",
        "WeightVersion",
        "publish",
        "end_publishing",
    ),
    "Compression": ("FP16", "BF16", "Int8", "OneBit", "TopK", "PowerSGD"),
    "Conditions of your own": ("validator", "Roster", "RosterMember", "Reject"),
    "Planning": ("plan",),
    "Without a session": (
        *("distribute", "data_share", "forward_backward", "clip_grad_norm", "state_dict"),
        *("run_in_memory", "init_mpi"),
    ),
}
"""Names that `shoal` exports, in the order of the page; all other exports are at its end."""


OTHER_VARIABLES = {
    "SHOAL_LOG_LEVEL": "the lowest level that coordinators and parameter servers log: `debug`,"
    " `info` (default), `warning` or `error`",
    "SHOAL_TRANSPORT": "`tcp`: tensors are not sent through shared memory, even on one machine;"
    " `grpc`: neither through shared memory nor over bulk connections to parameter servers",
    "SHOAL_SERIES": "the series of published weights that `shoal.integrations.trl` and `.verl` use",
    "SHOAL_CERTIFICATE_WAIT_S": "seconds for which a member that was admitted before waits for"
    " an accepted certificate (600)",
}


def pages() -> Mapping[str, str]:
    """The text of each page, by file name."""
    return {"api.md": api(), "commands.md": commands(), "configuration.md": configuration()}


def exports() -> Mapping[str, str]:
    """The module of each name that `shoal` exports."""
    imports = [
        node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ImportFrom)
    ]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def api() -> str:
    """The page of the API: one entry for each export, by groups."""
    homes = exports()
    grouped = {name for names in GROUPS.values() for name in names}
    groups = {**GROUPS, "More": tuple(sorted(homes.keys() - grouped))}
    parts = [
        "# Python API\n\nWhat `import shoal` offers."
        " Errors are in [troubleshooting](../troubleshooting.md).\n"
    ]
    for title, names in groups.items():
        parts += [f"## {title}\n"] if names else []
        for name in names:
            options = f"    options:\n      heading: shoal.{name}\n      toc_label: {name}\n"
            parts.append(f"::: {homes[name]}.{name}\n{options}")
    return "\n".join(parts)


def commands() -> str:
    """The page of the commands: all their options, from the config classes that define them."""
    from shoal_client.cli import build_app, installed_commands  # noqa: PLC0415

    text = build_app(installed_commands()).generate_docs(heading_level=1, flatten_commands=True)
    introduction = (
        "\nMade from the classes that the options are read into;"
        " `shoal COMMAND --help` shows the same.\n"
    )
    title, _, rest = text.partition("\n")
    return f"# Commands\n{introduction}\n{rest}" if title.startswith("# ") else text


def configuration() -> str:
    """The page of the other settings: the environment of a worker, and time limits."""
    from shoal.membership import join_config  # noqa: PLC0415
    from shoal_server.config_command import limit_descriptions, limit_text  # noqa: PLC0415
    from shoal_server.core.limits import Limits  # noqa: PLC0415

    documented = field_docs(inspect.getsource(join_config), "JoinConfig")
    variables = environment(inspect.getsource(join_config))
    fields = {field.name: field for field in dataclasses.fields(join_config.JoinConfig)}
    names = {"coordinators": "coordinator"}
    rows = [
        (f"`{names.get(name, name)}`", f"`{variables[name]}`", _default(field), documented[name])
        for name, field in fields.items()
        if name in variables
    ]
    limits = Limits()
    times = [(f"`{name}`", limit_text(limits, name), text) for name, text in limit_descriptions()]
    return "\n".join(
        [
            "# Configuration\n",
            "Options of commands are in [commands](commands.md), options of strategies in the"
            " [API](api.md).\n",
            "## A worker\n",
            "Arguments of `shoal.join`, and the environment variables that are read for arguments"
            " that are not given. `shoal run` sets the variables for its workers.\n",
            *table(("argument", "variable", "default", "what it is"), rows),
            "\n## Other variables\n",
            *table(("variable", "what it is"), [(f"`{k}`", v) for k, v in OTHER_VARIABLES.items()]),
            "\n## Time limits\n",
            "The limits of a coordinator with its defaults, in seconds. You choose `--heartbeat-s`,"
            " `--join-s`, `--collective-s` and `--wait-for-members-s`; the others are computed from"
            " these. `shoal config` prints them for other choices.\n",
            *table(("limit", "seconds", "what it is"), times),
            "",
        ]
    )


def field_docs(source: str, name: str) -> Mapping[str, str]:
    """The docstring under each field of a class, by field."""
    tree = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name)
    found = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        is_field = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if is_field and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return found


def environment(source: str) -> Mapping[str, str]:
    """The variable that each field of JoinConfig is read from."""
    found = dict(re.findall(r'(?:text|number)\(\s*"(\w+)", "(SHOAL_\w+)"', source))
    if "coordinator" in found:
        found["coordinators"] = found.pop("coordinator")
    return found


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def _default(field: "dataclasses.Field[object]") -> str:
    known = field.default is not dataclasses.MISSING and field.default not in ("", ())
    return f"`{field.default}`" if known else ""
