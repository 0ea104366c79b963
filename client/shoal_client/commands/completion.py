"""`shoal completion`: prints a script with which a shell completes commands and options."""

from dataclasses import dataclass, field
from typing import Literal

from shoal_client.cli import build_app, installed_commands


@dataclass(frozen=True, kw_only=True)
class CompletionConfig:
    """Prints a completion script.

    bash: `source <(shoal completion bash)` in ~/.bashrc. zsh: `shoal completion zsh >
    "${fpath[1]}/_shoal"`.
    """

    shell: Literal["bash", "zsh"] = field(kw_only=False)
    """The shell to print it for."""


def completion(config: CompletionConfig) -> int:
    """Print the script."""
    print(build_app(installed_commands()).generate_completion(shell=config.shell))
    return 0
