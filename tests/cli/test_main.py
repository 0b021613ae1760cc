"""The command as a person runs it: a real process each time."""

import subprocess
import sys

COMMANDS = ["generate", "inspect", "compare", "checkpoint", "info"]


def glmflash(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "glmflash.cli.main", *arguments], capture_output=True, text=True
    )


def test_version() -> None:
    import glmflash as package

    assert glmflash("--version").stdout == f"glmflash {package.__version__}\n"


def test_help_names_every_command() -> None:
    done = glmflash("--help")
    assert done.returncode == 0
    for command in COMMANDS:
        assert command in done.stdout
        assert "Example" in glmflash(command, "--help").stdout


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "import glmflash, glmflash.cli.main\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'PIL', 'av', 'jinja2', 'httpx', 'transformers',"
        " 'huggingface_hub', 'safetensors'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_user_mistakes_are_one_line_and_exit_2() -> None:
    for arguments in (
        ["generate", "/no/such/place", "hello"],
        ["inspect", "/no/such/place"],
        ["generate", ".", ""],
        ["nonsense"],
    ):
        done = glmflash(*arguments)
        assert done.returncode == 2, arguments
        assert "Traceback" not in done.stderr
        assert done.stderr.strip()
