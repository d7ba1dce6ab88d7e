"""Exit codes and messages of the command: errors, signals, closed pipes, and unprintable names."""

import os
import signal
import subprocess
import sys

import pytest

PYTHON = [sys.executable, "-m", "fmwc"]


def command(*words, **options):
    return subprocess.run([*PYTHON, *map(str, words)], capture_output=True, text=True, timeout=120, **options)


def stubbed(body: str) -> list[str]:
    """Return a command line that runs `body` instead of a command of `fmwc`, so that it starts without delay."""
    code = f"import sys, time, fmwc.__main__ as m\ndef run(words, *_):\n{body}\n    return 0\nm._run = run\nm.main()"
    return [sys.executable, "-c", code]


# ---- errors ------------------------------------------------------------------------------------------------------

CASES = {
    "an unexpected error": ("raise KeyError('x')", 70, "fmwc: unexpected KeyError: 'x' (add --debug for"),
    "of several lines": ("raise RuntimeError('one\\ntwo')", 70, "fmwc: unexpected RuntimeError: one (add --debug"),
    "a path": ("open('/no/such\\x1b[31m file')", 2, "fmwc: [Errno 2] No such file or directory: "),
    "ours, of several lines": (
        "import fmwc.errors as e; raise e.DataError('a\\x1b[2J\\nb')", 2, "fmwc: a?[2J b\n"
    ),
    "a package that is not there": ("import no_such.thing", 2, "fmwc: this command needs 'no_such'"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_error_is_one_line(case):
    body, code, said = CASES[case]
    found = subprocess.run(stubbed(f"    {body}"), capture_output=True, text=True)
    assert found.returncode == code
    assert found.stderr.startswith(said), found.stderr
    assert len(found.stderr.splitlines()) == 1
    assert found.stderr.isprintable() or found.stderr.strip().isprintable()


@pytest.mark.parametrize(("words", "env"), [(["--debug"], {}), ([], {"FMWC_DEBUG": "1"})])
def test_debug_adds_the_traceback(words, env):
    found = subprocess.run(
        [*stubbed("    assert '--debug' not in words\n    raise KeyError('x')"), *words],
        capture_output=True,
        text=True,
        env=os.environ | env,
    )
    assert found.returncode == 70
    assert "Traceback" in found.stderr
    assert found.stderr.splitlines()[-1].startswith("fmwc: unexpected KeyError")


# ---- signals -----------------------------------------------------------------------------------------------------

WAITING = """\
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("cleaned up", flush=True)"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signals to send")
@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGTERM, "SIGTERM"), (getattr(signal, "SIGHUP", 1), "SIGHUP"), (signal.SIGINT, "Ctrl-C")],
)
def test_signals_end_the_command_like_ctrl_c(number, name):
    with subprocess.Popen(stubbed(WAITING), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert out == "cleaned up\n"
    assert err == f"fmwc: interrupted ({name}); run the same command again\n"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no signals to send")
def test_a_second_signal_does_not_interrupt_cleanup():
    body = WAITING.replace('print("cl', 'import os, signal; os.kill(os.getpid(), signal.SIGHUP); print("cl')
    with subprocess.Popen(stubbed(body), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.terminate()
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (128 + signal.SIGTERM, "cleaned up\n")


# ---- printing ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="pipes of POSIX")
def test_a_closed_pipe_ends_the_command_silently():
    body = "    from fmwc.cli.verbs import say; say('x' * 10_000_000)"  # more than a pipe holds
    with subprocess.Popen(stubbed(body), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
    assert process.wait() == 141
    assert err == b""


TITLES = ("runs[/old]", "[bold]x[/bold]", "a:smile:b", "{task.description}", "1,234", "\x1b[31mred\x07", "\udcff", "β")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_text_is_printed_without_markup(encoding):
    code = (
        "from fmwc.cli.verbs import say, print_rows, print_table, print_written; from fmwc.progress import *\n"
        f"for title in {TITLES!r}:\n"
        "    say(title); print_rows([{'': title, 'value': title}], title); print_written([title])\n"
        "    print_table([{title: title}], title)\n"
        "    with sampling_bar(title, 3) as bar: bar(1)\n"
        "    with stages_bar() as bar: bar(title, 1, 2)\n"
        "    with training_bar() as bar: bar(title, 1, 2, 0.5)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", f"import sys, fmwc.__main__ as m\ndef run(words, *_):\n    exec({code!r})\n"
         "    return 0\n"
         "m._run = run\nm.main()"],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": encoding, "COLUMNS": "100"},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    out, err = found.stdout.decode(encoding), found.stderr.decode(encoding)
    for title in TITLES[:5]:
        assert out.count(title) == 8, title
        assert err.count(title) >= 3, title
    assert "\x1b" not in out + err
    assert "?[31mred?" in out


# ---- help --------------------------------------------------------------------------------------------------------


def test_version():
    found = command("--version")
    assert found.returncode == 0
    assert found.stdout.split()[:2] == ["fmwc", __import__("fmwc").__version__]
