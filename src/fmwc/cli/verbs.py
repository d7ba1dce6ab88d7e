"""The commands of `fmwc`: their options and their printed results.

Each command is a dataclass: its docstring is the help text, its fields are the options, and `run` calls the function
that does the work and prints the result. This module does not import torch or pandas, so that `fmwc --help` stays fast.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

import fmwc
from fmwc.progress import say_on_stderr
from fmwc.readers import shown
from fmwc.registry import DOMAINS


def _run(verb: Any, **_: Any) -> None:
    """Run the command whose options were parsed."""
    verb.run()


app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    result_callback=_run,
)


def _version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        commit = f" ({import_module('fmwc._commit').COMMIT})"  # recorded when the package is built
    except (ImportError, AttributeError):
        commit = ""
    import platform
    from importlib import metadata  # reads versions without importing the packages

    packages = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "numpy"))
    say(f"fmwc {fmwc.__version__}{commit} with Python {platform.python_version()}, {packages} on {platform.platform()}")
    raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[
        bool, Option("--debug", help="Print the traceback of an error (or FMWC_DEBUG=1). Allowed after any command.")
    ] = False,  # handled in fmwc.__main__
) -> None:
    """Flow matching with confidence: draw samples and estimate how far to trust each of them."""


# ---- printing --------------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Print text without markup or wrapping; control characters become question marks."""
    print("\n".join(map(shown, text.splitlines())), flush=True)


def print_rows(rows: list[dict[str, str]], title: str) -> None:
    """Print a table of names and values."""
    print_table(rows, title, header=False)


def print_table(rows: list[dict[str, str]], title: str, *, header: bool = True) -> None:
    """Print a table, by default with a header."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    def plain(value: str) -> Text:  # rich interprets markup, emoji and numbers in str, but not in Text
        return Text(shown(value))

    table = Table(title=plain(title), show_header=header)
    for name in rows[0] if rows and header else ():
        table.add_column(plain(name))
    for row in rows:
        table.add_row(*map(plain, row.values()))
    Console(markup=False, emoji=False, highlight=False).print(table)


def print_written(paths: list[Path]) -> None:
    """Print the files that were written."""
    if paths:
        say(f"wrote {', '.join(map(shown, paths))}")


# ---- shared options --------------------------------------------------------------------------------------------------


def _one_of(*names: str) -> Any:
    """Return a function that completes one of these names in a shell."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


_shipped = _one_of(*DOMAINS, "checkerboard-joint", "mnist-joint")

Which = Annotated[str, Argument(help=f"{', '.join(DOMAINS)}.", autocompletion=_one_of(*DOMAINS))]
Out = Annotated[Path, Option("--out", "-o", help="Folder to write to.")]
Set = Annotated[list[str] | None, Option("--set", help="Change a recipe field: --set key=value. May be repeated.")]
Device = Annotated[str, Option(help="auto, cpu or cuda.", autocompletion=_one_of("auto", "cpu", "cuda"))]
Seed = Annotated[int, Option(min=-(1 << 63), max=(1 << 63) - 1, help="Random seed.")]
Force = Annotated[bool, Option("--force", help="Replace what is in the folder.")]
Count = Annotated[int, Option("-n", "--count", min=0, help="Number of samples; 0: the domain's default.")]
Data = Annotated[str, Option(help="Folder of the data; default: FMWC_DATA, or else the cache (downloaded if needed).")]
JudgedBy = Annotated[
    str,
    Option(
        "--judge", help="mnist: folder of a classifier trained on your data. crystals: energy model; default: chgnet."
    ),
]
Network = Annotated[
    str,
    Option(help="For a checkpoint of fmwc retrofit: module:function that builds its network. Use only trusted code."),
]
Own = Annotated[bool, Option("--own", help="Read your own image data: idx files, .npz, or a folder of images.")]
Samples = Annotated[Path, Argument(help="A folder that fmwc sample wrote, or its samples.safetensors.")]
Checkpoint = Annotated[
    str,
    Option(
        help="Checkpoint of the samples: a shipped name or a folder; default: the recorded one.",
        autocompletion=_shipped,
    ),
]
Labelled = Annotated[
    str,
    Option(
        "--labels",
        help="Which samples failed: a CSV or Parquet file, or a folder that fmwc judge --out wrote, matched by the "
        "column 'name' if there is one; a text file with one 0 or 1 (failed) per line; or the name of a column of the "
        "samples' table. Default column: 'bad', 'good' or, of a judge's table, 'metastable'. Samples may lack a label.",
    ),
]
Column = Annotated[
    str, Option(help="Column of --labels; its values are true for good samples unless --good or --bad says otherwise.")
]
Good = Annotated[
    str,
    Option(
        help="Column of --labels that is true for good samples, such as metastable; or a condition that good samples "
        "fulfil, such as 'e_above_hull <= 0.05' (with --column: '<= 0.05')."
    ),
]
Bad = Annotated[str, Option(help="Like --good, for failed samples.")]


# ---- commands, in the order of the help text ------------------------------------------------------------------------


@app.command("demo")
@dataclass(frozen=True)
class Demo:
    """Draw samples with confidence and write a report page.

    Uses the shipped weights. A second run into the same folder replaces the files of the first.
    """

    domain: Which = "checkerboard"
    out: Out = Path("demo")
    train: Annotated[
        bool, Option("--train", help="checkerboard: train a small model first instead of loading weights.")
    ] = False
    seed: Seed = 0
    changes: Set = None
    device: Device = "auto"
    count: Count = 0
    force: Force = False

    def run(self) -> None:
        from fmwc.cli.report import write_demo

        _print_page(write_demo(self), f"{self.domain}, demonstration")


@app.command("report")
@dataclass(frozen=True)
class Report:
    """Write the report page of samples, or of a checkpoint.

    Samples are shown as fmwc sample or fmwc filter wrote them, with the judge's table if there is one and links to
    their files. For a results folder of the paper's experiments, run python -m experiments report.
    """

    source: Annotated[
        str,
        Argument(help="A folder of samples; or a checkpoint: a shipped name or a folder.", autocompletion=_shipped),
    ]
    out: Annotated[
        Path | None,
        Option("--out", "-o", help="Folder to write to; required for a checkpoint, else FOLDER/report by default."),
    ] = None
    count: Count = 0
    seed: Annotated[
        int | None,
        Option(min=-(1 << 63), max=(1 << 63) - 1, help="Seed of the samples of a checkpoint; default: 2026."),
    ] = None
    checkpoint: Checkpoint = ""
    judge: JudgedBy = ""
    network: Network = ""
    device: Device = "auto"
    force: Force = False

    def run(self) -> None:
        from fmwc.cli.report import write_report

        _print_page(write_report(self), self.source)


def _print_page(page: Any, title: str) -> None:
    print_rows(page.rows, title)
    say(f"{page.seconds:.0f} s; open {page.path}")


@app.command("train")
@dataclass(frozen=True)
class Train:
    """Train a model with confidence; resumes if interrupted.

    On several GPUs: torchrun --nproc-per-node=2 -m fmwc train … gives the same result, up to rounding.
    """

    domain: Which
    out: Out
    preset: Annotated[str, Option(help="recommended, paper or quick; for mnist also judge, the classifier.")] = (
        "recommended"
    )
    seed: Seed = 0
    changes: Set = None
    data: Data = ""
    own: Own = False
    device: Device = "auto"
    force: Force = False

    def run(self) -> None:
        from fmwc.cli.train import train

        for line in train(self):
            say(line)


@app.command("retrofit")
@dataclass(frozen=True)
class Retrofit:
    """Add confidence to a trained flow model.

    Fits only the noise; the network's weights do not change. A tenth of the data is held out, and the loss on it shows
    whether more steps would help. If the data has classes, samples are compared within their class. The module is
    executed, so use only trusted code. On several GPUs: torchrun --nproc-per-node=2 -m fmwc retrofit …
    """

    network: Annotated[str, Argument(help="module:function that returns the network, or (network, space).")]
    out: Out
    weights: Annotated[
        str, Option(help="State dict of the network (.safetensors or .pt); not needed if the function loads it.")
    ] = ""
    data: Annotated[
        str,
        Option(
            help="Training samples: an .npz, .safetensors or .pt file with an array x (or x.CHANNEL for each channel), "
            "one row per sample; other arrays are conditions, by name. Or an .npy file."
        ),
    ] = ""
    own_samples: Annotated[
        int, Option(help="Without --data: draw this many samples from the network and fit the noise to those.")
    ] = 0
    steps: Annotated[int, Option(help="Optimiser steps.")] = 2_000
    batch: Annotated[int, Option(help="Samples per step.")] = 256
    lr: Annotated[float, Option(help="Learning rate.")] = 1e-3
    beta: Annotated[float, Option(help="Weight of the KL divergence.")] = 1e-3
    include: Annotated[
        list[str] | None, Option(help="Glob pattern of layers with noise; default: all. May be repeated.")
    ] = None
    exclude: Annotated[list[str] | None, Option(help="Glob pattern of layers without noise. May be repeated.")] = None
    score: Annotated[str, Option(help="Score to compute confidence from; default: chosen by a pilot run.")] = ""
    pairs: Annotated[
        str,
        Option(
            help="Coupling of noise and data in the network's training: independent, or ot (optimal transport "
            "within each batch)."
        ),
    ] = "independent"
    conventions: Annotated[
        bool, Option(help="Check on one batch that time and velocity follow the conventions of the network's training.")
    ] = True
    captured: Annotated[
        bool,
        Option(
            "--capture/--no-capture",
            help="On a GPU, replay steps as a CUDA graph; not for networks whose shapes depend on values.",
        ),
    ] = False
    seed: Seed = 0
    device: Device = "auto"
    force: Force = False

    def run(self) -> None:
        from fmwc.cli.train import retrofit

        for line in retrofit(self):
            say(line)


@app.command("sample")
@dataclass(frozen=True)
class Sample:
    """Draw samples, each with a confidence.

    Confidence is the share of the checkpoint's reference samples that have a worse score. It is withheld if samples are
    drawn differently from the reference, for example with another number of steps; the rank within the run is still
    available.

    Writes samples.safetensors and samples.csv; for digits and crystals also a picture, sorted by confidence. For
    crystals, also writes one CIF per structure (or one extended XYZ file) and adds the judge's results to the table.
    For crystals and your own networks, also writes the table as Parquet.

    The folder appears when all files are complete; fmwc screen resumes if interrupted. Runs of more than 50,000
    samples are written batch by batch, with scores only, so that memory use stays constant.
    """

    checkpoint: Annotated[
        str,
        Argument(
            help="A shipped name (checkerboard, mnist, crystals, checkerboard-joint, mnist-joint) or a folder.",
            autocompletion=_shipped,
        ),
    ]
    out: Out
    count: Annotated[int, Option("-n", "--count", min=1, max=10**9, help="Number of samples.")] = 1000
    label: Annotated[int | None, Option(help="Class to draw; default: all classes in turn.")] = None
    judge: JudgedBy = ""
    network: Network = ""
    steps: Annotated[int, Option(min=1, max=10**5, help="Integration steps.")] = 50
    stepper: Annotated[str, Option(help="Integration method: euler, midpoint or heun.")] = "euler"
    propagation: Annotated[
        str,
        Option(
            help="Estimator of the variance: linearised, diagonal, tangent, monte_carlo or none; default: the one "
            "that the checkpoint's confidence uses."
        ),
    ] = ""
    controller: Annotated[
        str,
        Option(
            help="Step-size controller: uniform, ema, damped (both from the paper), extrapolated (second-order steps), "
            "or grid (the same steps for all samples, fitted to the variance of a pilot run)."
        ),
    ] = "uniform"
    guide: Annotated[
        float,
        Option(help="Strength of guidance towards low variance; 0.2 is strong. Makes sampling several times slower."),
    ] = 0.0
    guide_window: Annotated[str, Option(help="Time interval in which guidance acts, such as 0.5-0.9.")] = ""
    every: Annotated[
        int,
        Option(
            min=0,
            max=10**5,
            help="Compute the variance at every k-th step, for example to use another score; 0: at the times that the "
            "checkpoint's confidence needs.",
        ),
    ] = 0
    transport: Annotated[bool, Option("--transport", help="Also compute the transported dispersion.")] = False
    score: Annotated[
        str, Option(help="Score to rank samples by; default: the checkpoint's, or dispersion with --transport.")
    ] = ""
    keep: Annotated[float, Option(help="Share of samples to keep, most confident first.")] = 1.0
    check: Annotated[
        int,
        Option(
            min=0,
            max=10**5,
            help="Check finished samples with the flow itself, using at most this many network evaluations per sample; "
            "0: use the check that the checkpoint's confidence needs.",
        ),
    ] = 0
    no_check: Annotated[bool, Option("--no-check", help="Skip the checks that the checkpoint's confidence needs.")] = (
        False
    )
    best_of: Annotated[
        int, Option(min=1, max=1000, help="Draw this many candidates per sample and keep the most confident.")
    ] = 1
    budget: Annotated[
        int,
        Option(min=0, max=10**7, help="Instead of --best-of: network evaluations per sample to spend on candidates."),
    ] = 0
    format: Annotated[
        str,
        Option(
            help="crystals: comma-separated list of cif, poscar (one file per structure), extxyz and db (an ASE "
            "database, one file); default: cif."
        ),
    ] = ""
    symmetrise: Annotated[
        float,
        Option(help="crystals: also write CIF files with the symmetry that spglib finds with this tolerance in Å."),
    ] = 0.0
    atom_doubt: Annotated[
        bool,
        Option("--atom-doubt", help="crystals: also compute the doubt of each atom, with four more evaluations."),
    ] = False
    elements: Annotated[str, Option(help="crystals: only these elements may occur, as in Li,Fe,P,O.")] = ""
    exclude: Annotated[str, Option(help="crystals: these elements never occur, as in Pm,Tc,U.")] = ""
    system: Annotated[str, Option(help="crystals: all of these elements occur and no others, as in Li-Fe-P-O.")] = ""
    atoms: Annotated[str, Option(help="crystals: number of atoms in the cell, as in 12 or 8-16.")] = ""
    formula: Annotated[
        str,
        Option(
            help="crystals: predict structures of this composition, as in LiFePO4. The cell holds the formula once or "
            "several times; choose with --atoms."
        ),
    ] = ""
    seed: Seed = 0
    device: Device = "auto"
    force: Force = False

    def run(self) -> None:
        from fmwc.cli.sample import draw_samples

        print_written(draw_samples(self))


@app.command("check")
@dataclass(frozen=True)
class Check:
    """Check finished samples from any source with a flow model.

    Writes checks.csv (condition, score, rank, and for a contest the rival condition and the margin), checks.json, and a
    page, checks.html. For images, also writes checks.png with the least confident ones.

    The confidence in checks.csv is based on the check alone. The confidence of fmwc sample may also use the trajectory,
    which is unknown for finished samples, so the two numbers can differ for the same sample.
    """

    samples: Annotated[
        Path,
        Argument(
            help="A folder that fmwc sample wrote, an array file (.npz with x and conditions by name), a folder of "
            "images with one subfolder per class, or CIF files."
        ),
    ]
    out: Out
    checkpoint: Annotated[
        str, Option(help="Checkpoint that checks the samples: a shipped name or a folder; default: the recorded one.")
    ] = ""
    network: Network = ""
    evaluations: Annotated[
        int,
        Option(
            min=0,
            max=10**5,
            help="Maximum number of network evaluations per sample; 0: that of the checkpoint, or 20.",
        ),
    ] = 0
    evidence: Annotated[
        str,
        Option(
            help="Kind of check: contest (the requested condition against the others), echo (the requested condition "
            "alone), or nearest (training points stored in the checkpoint); default: that of the checkpoint's "
            "reference, or contest if there are classes."
        ),
    ] = ""
    seed: Seed = 0
    device: Device = "auto"
    force: Force = False

    def run(self) -> None:
        from fmwc.cli.check import check_samples

        _print_outcome(*check_samples(self), "check")


def _print_outcome(rows: list[dict[str, str]], written: list[Path], title: str) -> None:
    print_rows(rows, title)
    print_written(written)


@app.command("filter")
@dataclass(frozen=True)
class Filter:
    """Keep the samples with the highest confidence.

    Keeps a given share or number of samples, or as many as possible with a guaranteed failure rate. Writes the kept
    samples, their rows of the table, and their structure files. For a guarantee, choose the samples to label at random.
    """

    samples: Samples
    out: Out
    keep: Annotated[float | None, Option(help="Share of samples to keep, in (0, 1].")] = None
    budget: Annotated[int | None, Option(help="Number of samples to keep.")] = None
    max_risk: Annotated[
        float | None,
        Option(help="Guarantee a failure rate of at most this value, and keep as many samples as possible."),
    ] = None
    certificate: Annotated[
        Path | None,
        Option(
            "--certificate",
            "--promise",
            help="Apply a certificate (promise.json) of --max-risk, made for samples drawn and scored the same way.",
        ),
    ] = None
    labels: Labelled = ""
    column: Column = ""
    good: Good = ""
    bad: Bad = ""
    probability: Annotated[float, Option(help="Probability with which the guarantee of --max-risk holds.")] = 0.9
    at_random: Annotated[
        bool, Option(help="State that the labelled samples are a random choice, although their scores differ.")
    ] = False
    score: Annotated[str, Option(help="Score to rank by; default: the run's score.")] = ""
    force: Force = False

    def run(self) -> None:
        from fmwc.cli.filter import filter_samples

        _print_outcome(*filter_samples(self), "filter")


@app.command("edit")
@dataclass(frozen=True)
class Edit:
    """Edit samples: add noise at a chosen time and integrate again.

    Writes the same files as fmwc sample, plus edits.csv (what changed) and edits.png (before and after). An edit of a
    crystal is useful if the result is metastable and either another crystal of the same formula (polymorph) or another
    formula on the same prototype (substitution); success by the paper's rules has a column of its own.
    """

    samples: Samples
    out: Out
    channel: Annotated[str, Option(help="Channel to perturb (crystals: type, coord, lattice); default: all.")] = ""
    at: Annotated[
        str,
        Option(
            help="Time of the edit: critical (the paper's t*, the peak of the variance), transported (the time that "
            "contributes most to the variance of the endpoint; needs samples drawn with --transport), random, or a "
            "number in [0, 1). Default: critical; for crystals, the time that was best on validation for the channel."
        ),
    ] = ""
    before: Annotated[float, Option(help="Edit this long before the critical time.")] = 0.0
    scale: Annotated[
        float | None,
        Option(
            help="Standard deviation of the noise, in the unit of the channel (for all channels: training units). "
            "Default: 0.2; for crystals, unless the time is critical, what was best on validation for the channel."
        ),
    ] = None
    replicates: Annotated[int, Option(min=1, max=10**5, help="Edits per sample.")] = 1
    label: Annotated[int | None, Option(help="mnist: new class.")] = None
    only: Annotated[str, Option(help="Edit only these samples: comma-separated indices from 0.")] = ""
    surest: Annotated[int | None, Option(help="Edit this many samples, most confident first.")] = None
    doubtful: Annotated[int | None, Option(help="Edit this many samples, least confident first.")] = None
    checkpoint: Checkpoint = ""
    judge: JudgedBy = ""
    seed: Seed = 0
    device: Device = "auto"
    force: Force = False

    def run(self) -> None:
        from fmwc.cli.edit import edit_samples

        _print_outcome(*edit_samples(self), "edit")


@app.command("judge")
@dataclass(frozen=True)
class Judge:
    """Judge crystal structures by energy, validity and novelty.

    Accepts structures from any source and prints one row per structure: energy above the hull, the phases it competes
    with, validity, uniqueness, novelty. Structures that cannot be judged are listed with the reason, and the exit code
    is 1. Where the references of a chemical system are too few, the energy above the hull is unknown.

    The judge is an energy model, not DFT. For 104 structures with published DFT energies, CHGNet's energy above the
    hull is 0.10 eV/atom too low: of the structures that it calls metastable (at most 0.1 eV/atom), 55 % are by DFT
    (precision 0.55, recall 0.97). With --cut 0.03, precision is 0.74 and recall 0.86.
    """

    structures: Annotated[
        list[Path],
        Argument(help="CIF, POSCAR or extended XYZ files, folders of them, or a folder of fmwc sample crystals."),
    ]
    out: Annotated[Path | None, Option("--out", "-o", help="Folder for the table, as CSV and Parquet.")] = None
    calculator: Annotated[
        str,
        Option(
            help="Energy model: chgnet, sevennet, mace, mattersim, orb, uma, or module:function; several, separated by "
            "commas, add their columns and a consensus."
        ),
    ] = "chgnet"
    relax: Annotated[
        int,
        Option(help="Relax each structure first, with at most this many steps."),
    ] = 0
    cut: Annotated[float, Option(help="Largest energy above the hull of metastable structures, eV/atom.")] = 0.1
    data: Annotated[
        str,
        Option(
            help="Folder of known structures, such as MP-20: add its references to the hull, and judge novelty with "
            "respect to all of its splits; default: FMWC_DATA."
        ),
    ] = ""
    statistics: Annotated[
        bool,
        Option(
            "--statistics",
            help="Compare the set with the test split of --data, before and after --relax: validity, coverage and "
            "distances by CDVAE's definitions, space groups. Needs the extra tables. Takes 0.1 s per structure and "
            "core, once also for the test split.",
        ),
    ] = False
    jobs: Annotated[int, Option(min=1, max=256, help="Number of processes for --statistics.")] = 1
    as_json: Annotated[bool, Option("--json", help="Print one JSON object per structure.")] = False
    force: Force = False

    def run(self) -> None:
        from fmwc.cli.judge import judge_structures, result_rows, rows_left_out, summary_rows

        judgement, written, compared = judge_structures(self)
        for path in written:
            say_on_stderr(f"wrote {path}")
        if self.as_json:
            for row in judgement.rows():
                say(json.dumps({name: None if value != value else value for name, value in row.items()}))
        else:
            print_table(result_rows(judgement), "judged")
            if line := rows_left_out(judgement, self.out):
                say(line)
            print_rows(summary_rows(judgement, self.cut), f"{len(judgement)} structure{'s' * (len(judgement) != 1)}")
            if compared:
                print_table(compared, "compared with the test split")
        if any(judgement["problem"]):
            raise typer.Exit(1)


@app.command("screen")
@dataclass(frozen=True)
class Screen:
    """Draw many samples, keep the surest, judge them, write the best.

    Samples are drawn, checked, kept and judged in blocks, in this process or, with --workers or --address, on Ray.
    Resumes if interrupted: the same command computes only the missing blocks. Any number of workers and any size of
    the blocks give the same table.

    Writes results.parquet (one row per kept sample), ranked.csv and files of the best samples, funnel.json, and a page.
    """

    checkpoint: Annotated[str, Argument(help="A shipped name (checkerboard, mnist, crystals, …) or a folder.")] = ""
    out: Annotated[Path | None, Option("--out", "-o", help="Folder of the campaign.")] = None
    status: Annotated[
        Path | None, Option(help="Print how far the campaign in this folder is, instead of running one.")
    ] = None
    count: Annotated[int, Option("-n", "--count", min=1, max=10**12, help="Number of samples to draw.")] = 1000
    keep: Annotated[str, Option(help="Samples to keep, the surest: a share below 1, or a number; default: all.")] = ""
    promise: Annotated[
        Path | None, Option(help="Keep the samples that a certificate of fmwc filter --max-risk guarantees.")
    ] = None
    budget: Annotated[int, Option(min=0, max=10**6, help="Number of best samples to write to files.")] = 100
    judge: Annotated[
        str,
        Option(
            help="crystals: energy model, by name or module:function; default: chgnet. mnist: folder of a classifier. "
            "none: do not judge."
        ),
    ] = ""
    judge_device: Annotated[str, Option(help="Device of the judge: cpu or cuda.")] = "cpu"
    relax: Annotated[int, Option(min=0, help="crystals: relax with at most this many steps before judging.")] = 0
    cut: Annotated[float, Option(help="crystals: largest energy above the hull of metastable ones, eV/atom.")] = 0.1
    data: Annotated[
        str, Option(help="crystals: folder of known structures, such as MP-20, to judge novelty; default: FMWC_DATA.")
    ] = ""
    network: Network = ""
    label: Annotated[int | None, Option(help="Class to draw; default: all classes in turn.")] = None
    steps: Annotated[int, Option(min=1, max=10**5, help="Integration steps.")] = 50
    score: Annotated[str, Option(help="Score to rank by; default: the checkpoint's.")] = ""
    elements: Annotated[str, Option(help="crystals: only these elements may occur, as in Li,Fe,P,O.")] = ""
    exclude: Annotated[str, Option(help="crystals: these elements never occur, as in Pm,Tc,U.")] = ""
    system: Annotated[str, Option(help="crystals: all of these elements and no others, as in Li-Fe-P-O.")] = ""
    atoms: Annotated[str, Option(help="crystals: number of atoms in the cell, as in 12 or 8-16.")] = ""
    formula: Annotated[str, Option(help="crystals: composition, as in LiFePO4.")] = ""
    batch: Annotated[int, Option(min=0, help="Samples drawn together; 0: the domain's default. Changes rounding.")] = 0
    block: Annotated[int, Option(min=0, help="Samples per block, a multiple of the batch; 0: chosen from -n.")] = 0
    workers: Annotated[
        int,
        Option(
            min=0, max=10_000, help="Number of worker processes, with Ray; 0: with --address one per CPU, else none."
        ),
    ] = 0
    address: Annotated[str, Option(help="Address of a Ray cluster, such as auto; local: start one here.")] = ""
    share: Annotated[
        str,
        Option(
            help="Compute only a share of the blocks: 3/10 is task 3 of 10. Tasks of an array job work on one folder "
            "at the same time; the command without --share writes the results."
        ),
    ] = ""
    seed: Seed = 0
    device: Device = "auto"
    force: Force = False

    def run(self) -> None:
        from fmwc.screening import status
        from fmwc.screening.driver import run

        if self.status is None:
            _print_campaign(run(self))
            return
        print_table(status(self.status), str(self.status))


def _print_campaign(summary: Any) -> None:
    """Print the funnel and the files."""
    if summary.funnel:
        print_table(summary.rows(), "funnel")
    print_written(summary.written)
    if summary.note:
        say(summary.note)


@app.command("studio")
@dataclass(frozen=True)
class Studio:
    """Draw, look at, edit and export samples in the browser.

    Everything is computed on this machine; nothing is loaded from the network, and no other machine can connect.
    Requires pip install 'fmwc[studio]'.
    """

    what: Annotated[
        str,
        Argument(help="Where to start: a shipped name, the folder of a checkpoint, or samples of fmwc sample."),
    ] = ""
    out: Annotated[Path, Option("--out", "-o", help="Folder in which the studio keeps its runs.")] = Path("studio")
    port: Annotated[int, Option(min=0, max=65535, help="Port of the server; 0: any free port.")] = 8765
    browser: Annotated[bool, Option("--browser/--no-browser", help="Open the page in the browser.")] = True
    network: Network = ""
    judge: JudgedBy = ""
    device: Device = "auto"

    def run(self) -> None:
        from fmwc.studio.server import serve

        serve(self, say)
