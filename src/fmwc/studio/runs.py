"""The runs of a studio folder: how they are drawn, edited, exported and deleted, and what survives a restart.

A run is a folder, `runs/ID`, with `run.json` and the files that `fmwc sample` writes, in `samples/`. The states of a
drawn run (`states.safetensors`) and paths that were looked at (`paths/`) only save the time to compute them again.
"""

from __future__ import annotations

import re
import secrets
import shutil
import threading
import time
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from fmwc.checkpoint import identity
from fmwc.checks import check
from fmwc.cli.edit import integration
from fmwc.cli.filter import filter_samples, guarantee, population_of
from fmwc.cli.sample import Plan, RunRecord, draw, plan_samples, write
from fmwc.cli.verbs import Filter, Sample
from fmwc.errors import DataError, FmwcError, UsageError
from fmwc.files import fresh, write_bytes, write_json, write_tensors, written
from fmwc.modes import one_thread
from fmwc.readers import anything, read_bytes, read_json, record
from fmwc.report.gallery import packed
from fmwc.sampling import Trajectory
from fmwc.state import SINGLE, channels, tree_map
from fmwc.studio.models import AT, Model, Refused, checked
from fmwc.studio.samples import Content, arrays, read_path, trace
from fmwc.studio.worker import Job, Tell, Worker
from fmwc.uses.continuation import some_with_states
from fmwc.uses.edit import edit
from fmwc.uses.risk import risk_control

__all__ = ["Missing", "Run", "Studio"]

ID = re.compile(r"[0-9a-f]{12}")
REMEMBERED = 6  # runs whose samples are in memory
STATES = 256 << 20  # bytes of the states that are kept of a run
PREVIEW = 5_000  # samples shown while a run is drawn
PERIOD = 0.3  # seconds between two previews
SAVED = ("id", "model", "title", "options", "created", "state", "error", "parent", "facts", "pair")  # in run.json
ENDED = ("done", "failed", "cancelled", "interrupted")


class Missing(FmwcError):
    """Run, job or export that does not exist."""


@dataclass
class Run:
    """A run of the studio.

    Attributes:
        id: Its name in addresses and on disk.
        model: The name of the model that draws it.
        title: What the page calls it.
        folder: Where the studio keeps its files.
        options: The values of the form.
        samples: The folder of the samples.
        parent: The run and the sample that it is an edit of.
        facts: What :meth:`Content.facts` says of its samples; empty before there are any.
        pair: What is known before and after an edit.
        version: Increases when samples become available, so that the page asks for them again.
    """

    id: str
    model: str
    title: str
    folder: Path
    options: dict[str, Any]
    samples: Path
    created: str = ""
    state: str = "waiting"
    error: str = ""
    parent: dict[str, Any] | None = None
    facts: dict[str, Any] = dataclass_field(default_factory=dict)
    pair: dict[str, Any] | None = None
    version: int = 0
    job: str = ""
    opened: bool = False

    def save(self) -> None:
        """Write run.json."""
        if not self.opened:
            private(self.folder)
            write_json(self.folder / "run.json", {name: getattr(self, name) for name in SAVED})

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Read a run of an earlier start. One that had not ended was interrupted."""
        saved = read_json(folder / "run.json", record(dict.fromkeys(SAVED, anything)))
        run = cls(**saved, folder=folder, samples=folder / "samples")
        if run.id != folder.name or not isinstance(run.options, dict) or not isinstance(run.facts, dict):
            raise DataError(f"{folder / 'run.json'} does not describe a run")
        if run.state not in ENDED:
            run.state, run.error = "interrupted", "The studio was stopped before this run was finished."
        run.version = int(run.state == "done")
        return run


class Preview:
    """The states of a run that is being drawn."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.finished: list[tuple[Any, dict[str, Tensor]]] = []
        self.latest: tuple[Any, dict[str, Tensor]] | None = None
        self.done, self.time = 0, 0.0

    def show(self, x: Any, cond: dict[str, Tensor], first: int, t: float) -> None:
        """Show the states of a batch; at t = 1 they are finished."""
        self.time, self.latest, self.done = t, (x, cond), first
        if t >= 1:
            self.finished.append(self.latest)
            self.latest, self.done = None, first + len(next(iter(channels(x).values())))

    def tensors(self) -> bytes:
        """Return the latest samples for the page, as a safetensors file; nothing before the first step."""
        parts: list[tuple[Any, dict[str, Tensor]]] = []
        shown = 0
        for part in reversed([*self.finished, *([self.latest] if self.latest else [])]):
            parts.insert(0, part)
            shown += len(next(iter(channels(part[0]).values())))
            if shown >= PREVIEW:
                break
        if not parts:
            return b""
        x = tree_map(lambda *c: torch.cat(c), *(x for x, _ in parts))
        cond = {name: torch.cat([cond[name] for _, cond in parts]) for name in parts[0][1]}
        bounds = (0.0, 1.0) if self.kind == "mnist" else None
        return packed(arrays(x, cond, bounds), {"t": f"{self.time:.4f}", "done": str(self.done)})


class Studio:
    """The open models and all runs.

    Arguments:
        folder: The folder of the studio.
        models: The models that are open.
        tell: Publishes events to the pages.
    """

    def __init__(self, folder: Path, models: list[Model], tell: Tell) -> None:
        self.folder, self.tell = folder, tell
        self.models = {model.name: model for model in models}
        self.start = ""
        self.runs: dict[str, Run] = {}
        self.previews: dict[str, Preview] = {}
        self.contents: OrderedDict[str, Content] = OrderedDict()
        self.lock = threading.RLock()
        for path in sorted((folder / "runs").glob("*/run.json")):
            with suppress(FmwcError, OSError, TypeError):  # a folder that is not a run is left alone
                run = Run.read(path.parent)
                self.runs[run.id] = run
        self.worker = Worker(tell)
        for model in models:
            self._load(model)

    def _load(self, model: Model) -> None:
        self.worker.add(Job(f"Loading {model.name}", lambda _: model.load(), self._loaded))

    def _loaded(self, job: Job) -> None:
        self.tell("state", None)

    def close(self) -> None:
        """Stop the worker. A run that is being drawn can be resumed."""
        self.worker.close()

    # ---- lists -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return everything that the page lists."""
        runs = sorted(self.runs.values(), key=lambda run: run.created, reverse=True)
        return {
            "fields": [model.as_dict() for model in self.models.values()],
            "runs": [self.shown(run) for run in runs],
            "jobs": self.worker.all(),
            "start": self.start,
        }

    def run(self, name: str) -> Run:
        """Return a run; raise if there is none."""
        if name not in self.runs:
            raise Missing("this run does not exist; it was deleted, or belongs to another studio folder")
        return self.runs[name]

    def job(self, name: str) -> Job:
        """Return a job; raise if there is none."""
        if name not in self.worker.jobs:
            raise Missing("this job does not exist")
        return self.worker.jobs[name]

    def shown(self, run: Run) -> dict[str, Any]:
        """Return what the page lists of a run."""
        model = self.models.get(run.model)
        names = ("id", "title", "options", "created", "state", "error", "parent", "job")
        kind = model.words.kind if model and model.usable else "vectors"
        unknown = {"kind": kind, "count": run.options.get("count", 1), "judged": False, "order": {}, "score": None}
        return {
            **{name: getattr(run, name) for name in names},
            **unknown,
            "channels": [],
            **run.facts,
            "field": run.model,
            "data": run.version,
            "source": "opened" if run.opened else "edited" if run.parent else "drawn",
            "edits": model.edits() if model and not self.obstacle(run) else [],
        }

    def _changed(self, run: Run, **changes: Any) -> None:
        for name, value in changes.items():
            setattr(run, name, value)
        run.save()
        self.tell("run", self.shown(run))

    # ---- samples -----------------------------------------------------------------------------------------------------

    def content(self, run: Run) -> Content:
        """Return the samples of a run."""
        if not run.version:
            raise Missing(run.error or "this run has no samples yet")
        with self.lock:
            if run.id not in self.contents:
                file = run.samples if run.samples.is_file() else run.samples / "samples.safetensors"
                self._keep(run, Content.read(file))
            self.contents.move_to_end(run.id)
            return self.contents[run.id]

    def _keep(self, run: Run, content: Content) -> None:
        """Keep the samples of a run in memory; note what lists show of them."""
        with self.lock:
            self.contents[run.id] = content
            run.facts = {**content.facts(), "obstacle": self._unrepeatable(run, content)}
            while len(self.contents) > REMEMBERED:
                self.contents.popitem(last=False)

    def open_samples(self, samples: Path, device: torch.device) -> Run:
        """Open a folder of samples, or a samples file, as a run; open its model if it is known and not open yet."""
        content = Content.read(samples if samples.is_file() else samples / "samples.safetensors")
        made = RunRecord.read(content.run.made)
        model = next((m.name for m in self.models.values() if made.identity and _identity(m) == made.identity), "")
        if not model and Path(made.checkpoint).is_dir() and _identity_of(made.checkpoint) == made.identity:
            found = Model(Path(made.checkpoint).name, made.checkpoint, device)
            self.models[found.name], model = found, found.name
            self._load(found)
        name = sha256(str(samples.resolve()).encode()).hexdigest()[:12]
        run = Run(
            name, model or made.checkpoint, samples.resolve().name, self.folder / "runs" / name, {}, samples.resolve()
        )
        run.state, run.version, run.opened, run.created = "done", 1, True, _now()
        self._keep(run, content)
        self.runs[name] = run
        return run

    # ---- drawing -----------------------------------------------------------------------------------------------------

    def draw(self, model_name: str, values: Any) -> tuple[Run, Job]:
        """Start a run; raise if an option is wrong."""
        model = self.models.get(model_name)
        if model is None or not model.usable:
            raise UsageError((model and model.problem) or "this model is not open; start the studio with its folder")
        options = checked(model.controls(), values)
        run = self._new(model.name, _title(model, options), options)
        try:
            self._plan(run)  # raises before anything is written
        except FmwcError as error:
            named = next((name for name in options if f"--{name}" in str(error) or name in str(error).split()), "")
            raise Refused(str(error), named) from error
        return self._start(run)

    def again(self, run: Run) -> tuple[Run, Job]:
        """Finish a run that was stopped, or start a new one with the same options."""
        if run.parent or run.opened:
            raise UsageError("only runs that were drawn here can be drawn again")
        if run.state not in ENDED:
            raise UsageError("this run has not ended yet")
        return self.draw(run.model, run.options) if run.state == "done" else self._start(run)

    def _new(self, model: str, title: str, options: dict[str, Any], parent: dict[str, Any] | None = None) -> Run:
        name = secrets.token_hex(6)
        folder = self.folder / "runs" / name
        return Run(name, model, title, folder, options, folder / "samples", _now(), parent=parent)

    def _start(self, run: Run) -> tuple[Run, Job]:
        work = (lambda job: self._edit(job, run)) if run.parent else (lambda job: self._draw(job, run))
        job = Job(
            f"{'Editing' if run.parent else 'Drawing'} {run.title}", work, lambda job: self._ended(run, job), run.id
        )
        self.runs[run.id] = run
        self._changed(run, state="waiting", error="", job=job.id)
        return run, self.worker.add(job)

    def _ended(self, run: Run, job: Job) -> None:
        self.previews.pop(run.id, None)
        if run.id in self.runs:  # it was not deleted meanwhile
            self._changed(
                run, state=job.state, error=job.error, job="", version=run.version if job.state == "done" else 0
            )

    def _plan(self, run: Run) -> Plan:
        model = self.models[run.model]
        return plan_samples(sample_options(model, run), model.opened)

    def _draw(self, job: Job, run: Run) -> dict[str, Any]:
        """Draw, judge and write a run."""
        plan = self._plan(run)
        self._changed(run, state="drawing")
        states = _States(run, plan)
        with fresh(run.samples, force=True) as folder:
            with one_thread() if plan.domain.one_thread else nullcontext():
                drawn = draw(plan, job.bar, self._watch(job, run, plan, states))
            if isinstance(drawn, Trajectory):
                self._show(run, Content(drawn, None))
                job.progress(0, "Judging")
            write(plan, drawn, folder)
        states.write(run.folder / "states.safetensors")
        self.previews.pop(run.id, None)
        self._show(run, Content.read(run.samples / "samples.safetensors"))
        return {"run": run.id}

    def _show(self, run: Run, content: Content) -> None:
        self._keep(run, content)
        self._changed(run, state="judging", version=run.version + 1)

    def _watch(self, job: Job, run: Run, plan: Plan, states: _States) -> Any:
        """Return a function that shows the samples while they are integrated."""
        preview = self.previews[run.id] = Preview(plan.domain.name)
        count, told = plan.options.count, 0.0
        cond = plan.domain.conditions(plan.field, count, plan.options.label, plan.options.seed)
        cond = {name: value.cpu() for name, value in cond.items()}

        def on_step(first: int, t: Tensor, x: Any) -> None:
            nonlocal told
            rows, time_now = len(t), float(t.float().mean())
            job.progress((first + rows * time_now) / count)
            states.add(first, x)
            if (now := time.monotonic()) - told > PERIOD or time_now >= 1:
                told = now
                here = {name: value[first : first + rows] for name, value in cond.items()}
                preview.show(tree_map(lambda c: c.detach().cpu().clone(), x), here, first, time_now)
                self.tell("preview", {"run": run.id})

        return on_step

    # ---- paths and edits ---------------------------------------------------------------------------------------------

    def obstacle(self, run: Run) -> str:
        """Return why the path of a run's samples cannot be computed; empty if it can."""
        model = self.models.get(run.model)
        if model is None or not model.usable:
            return f"The path needs the model {run.model}, which is not open: start the studio with its folder."
        if not run.version:
            return "There are no samples yet."
        return str(run.facts.get("obstacle", ""))

    def _unrepeatable(self, run: Run, content: Content) -> str:
        """Return why the integration of these samples cannot be repeated; empty if it can."""
        model = self.models.get(run.model)
        if len(content.run.grid) < 2:
            return "Of a run this large only scores are kept, so the path is not known. Draw fewer samples."
        if run.parent or model is None or not model.usable:
            return ""
        try:
            integration(RunRecord.read(content.run.made), model.domain, model.field)
        except FmwcError as error:
            return str(error)
        return ""

    def trace(self, run: Run, sample: int) -> Job | None:
        """Start to compute the path of a sample; return `None` if it is known."""
        self._require(run, sample)
        if self._trace_file(run, sample).is_file():
            return None
        return self.worker.add(Job(f"Path of sample {sample}", lambda _: self._trace(run, sample), run=""))

    def trace_file(self, run: Run, sample: int) -> bytes:
        """Return a path that :meth:`trace` computed."""
        file = self._trace_file(run, sample)
        if not file.is_file():
            raise Missing("this path has not been computed yet")
        return read_bytes(file, STATES)

    def _trace_file(self, run: Run, sample: int) -> Path:
        return run.folder / "paths" / f"{sample}.safetensors"

    def _trace(self, run: Run, sample: int) -> None:
        model, content = self.models[run.model], self.content(run)
        path = read_path(model.field, self.path(run, sample))
        write_bytes(self._trace_file(run, sample), trace(model.field, path, content.bounds))

    def _require(self, run: Run, sample: int) -> None:
        """Raise unless the path of this sample can be computed."""
        if not 0 <= sample < run.facts.get("count", 0):
            raise Missing(f"this run has no sample {sample}")
        if problem := self.obstacle(run):
            raise UsageError(problem)

    def path(self, run: Run, sample: int) -> Trajectory:
        """Return one sample with its states. Edits are repeated from the original sample on."""
        if run.parent:
            origin = self.path(self.run(run.parent["run"]), run.parent["sample"])
            return self._edited(self.models[run.model], origin, run.options)
        model, content = self.models[run.model], self.content(run)
        index = torch.tensor([sample])
        one = content.run.take(index).to(model.field.device)
        if (states := _read_states(run.folder / "states.safetensors", one, sample)) is not None:
            return replace(one, states=states)
        whole = content.run.to(model.field.device)
        how = {**_how(model, whole), "confidence": None}
        return some_with_states(model.field, whole, index.to(model.field.device), **how)

    def _edited(self, model: Model, origin: Trajectory, options: dict[str, Any]) -> Trajectory:
        """Return an edit of a sample, with its states."""
        how = {**_how(model, origin), "confidence": None}
        label = options.get("label") or None
        cond = {} if label is None else model.domain.conditions(model.field, 1, int(label))
        how["cond"] = {name: value.to(model.field.device) for name, value in cond.items()}
        at, scale, channel = options["at"], options["scale"], options.get("channel") or None
        return edit(model.field, origin, channel, at=at, scale=scale, seed=options["seed"], **how)

    def edit(self, parent: Run, sample: int, values: Any) -> tuple[Run, Job]:
        """Start an edit of a sample."""
        self._require(parent, sample)
        model = self.models[parent.model]
        options = checked([*model.edits(), AT], values)
        what = f"noise {options['scale']:g} at t = {options['at']:.2f}"
        what += f", class {options['label']}" if options.get("label") else ""
        what += f" ({options['channel']})" if options.get("channel") else ""
        return self._start(self._new(parent.model, what, options, {"run": parent.id, "sample": sample}))

    def _edit(self, job: Job, run: Run) -> dict[str, Any]:
        """Edit a sample, judge it, and write it like any other samples."""
        assert run.parent is not None
        model = self.models[run.model]
        parent, sample = self.run(run.parent["run"]), run.parent["sample"]
        self._changed(run, state="drawing")
        job.progress(0, "integrating")
        before = self.path(parent, sample)
        job.progress(0.4)
        after = self._edited(model, before, run.options)
        job.progress(0.8, "judging")
        old, new = (self._checked(model, path) for path in (before, after))
        job.progress(0.9, "judging")
        with fresh(run.samples, force=True) as folder:
            made = {**before.made, **replace(RunRecord.read(before.made), by="edit").made()}
            model.domain.write_samples(replace(new, states=None, made=made), folder)
        content = Content.read(run.samples / "samples.safetensors")
        known = self.content(parent).about(sample), content.about(0)
        names = ("failed", "verdict")
        both = [
            _level_of(path) | {name: told[name] for name in names} for path, told in zip((old, new), known, strict=True)
        ]
        note = new.withheld or f"Both confidences are those of the check {new.default_score}, which needs no path."
        run.pair = {"before": both[0], "after": both[1], "note": note}
        self._show(run, content)
        return {"run": run.id}

    def _checked(self, model: Model, path: Trajectory) -> Trajectory:
        """Return one sample with the score and the confidence of a check, which do not depend on how it was made."""
        first, reference = 0 if path.index is None else int(path.index[0]), model.field.reference
        found = check(model.field, path.x, path.cond, seed=path.seed, first=first, conventions=False)
        extra = {name: value for name in ("rival", "margin") if torch.is_tensor(value := getattr(found, name))}
        parts = {} if found.withheld or reference is None else {part.score: part.quantiles for part in reference.parts}
        return replace(
            path,
            default_score=found.evidence,
            evidence={found.evidence: found.score, **extra},
            reference=parts.get(found.evidence),
            without=found.withheld,
            standard=None,
            ranks=None,
            scores=None,
        )

    # ---- what is known of one sample ---------------------------------------------------------------------------------

    def about(self, run: Run, sample: int) -> dict[str, Any]:
        """Return what the page shows of one sample at once."""
        content = self.content(run)
        if not 0 <= sample < len(content):
            raise Missing(f"this run has no sample {sample}")
        edits = [
            one for one in self.runs.values() if one.parent == {"run": run.id, "sample": sample} and one.state == "done"
        ]
        return {
            **content.about(sample),
            "problem": self.obstacle(run),
            "chain": [*self._chain(run, sample)],
            "edits": [{"run": one.id, "title": one.title} for one in edits],
        }

    def _chain(self, run: Run, sample: int) -> Iterator[dict[str, Any]]:
        """Yield the original sample and the edits that led to this one."""
        if run.parent and run.parent["run"] in self.runs:
            yield from self._chain(self.runs[run.parent["run"]], run.parent["sample"])
        yield {"run": run.id, "sample": sample, "title": run.title if run.parent else f"Original: sample {sample}"}

    def promise(self, run: Run, max_risk: float, probability: float) -> dict[str, Any]:
        """Return the largest share of the surest samples whose failure rate can be guaranteed."""
        content = self.content(run)
        if content.failed is None or content.score is None:
            return {"problem": "A guarantee needs labels and a score; these samples lack one of them."}
        finite = np.isfinite(content.score)
        try:
            population_of(content.run, "")
            found = risk_control(content.score[finite], content.failed[finite], max_risk, probability)
        except FmwcError as error:
            return {"problem": str(error)}
        kept = int((content.score[finite] <= found.threshold).sum())
        return {
            "share": kept / len(content),
            "kept": kept,
            "sentence": f"{guarantee(found, content.run.default_score)}.",
        }

    # ---- export and delete -------------------------------------------------------------------------------------------

    def export(self, run: Run, kept: Any) -> Job:
        """Start to write the surest samples as a folder."""
        count = kept_of(run, kept)
        return self.worker.add(Job(f"Exporting {count:,} samples", lambda job: self._export(job, run, count)))

    def _export(self, job: Job, run: Run, count: int) -> dict[str, Any]:
        name = f"{run.id}-{count}"
        out = private(self.folder / "exports") / name
        job.progress(0, "writing")
        if not (out / "samples.safetensors").is_file():
            filter_samples(Filter(run.samples, out, budget=count))
            self._pictures(run, out)
        files = sorted(path for path in out.rglob("*") if path.is_file() and not path.name.startswith(".fmwc"))
        names = [path.relative_to(out).as_posix() for path in files]
        with written(self._zip(name)) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for place, (path, inside) in enumerate(zip(files, names, strict=True)):
                job.progress(place / len(files))
                archive.write(path, f"samples/{inside}")
        return {"export": name, "folder": str(out.resolve()), "files": names}

    def _pictures(self, run: Run, out: Path) -> None:
        """Write the pictures that `fmwc sample` writes of such samples."""
        model = self.models.get(run.model)
        if model is not None and model.usable:
            kept = Content.read(out / "samples.safetensors")
            model.domain.pictures(kept.run, kept.columns, out)

    def _zip(self, name: str) -> Path:
        return self.folder / "exports" / f"{name}.zip"

    def exported(self, name: str) -> Path:
        """Return the archive of an export."""
        if not re.fullmatch(r"[0-9a-f]{12}-\d+", name) or not self._zip(name).is_file():
            raise Missing("this export does not exist")
        return self._zip(name)

    def delete(self, run: Run) -> None:
        """Delete a run and its edits. Exports stay."""
        if run.opened:
            raise UsageError("this folder was opened, not drawn here; delete it outside the studio")
        for other in [one for one in self.runs.values() if one.parent and one.parent["run"] == run.id]:
            self.delete(other)
        if run.job in self.worker.jobs:
            raise UsageError("this run has not ended yet; cancel it first")
        del self.runs[run.id]
        self.contents.pop(run.id, None)
        shutil.rmtree(run.folder)
        self.tell("removed", {"run": run.id})


def private(folder: Path) -> Path:
    """Return a folder that only this user can enter, and make it if it does not exist."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def sample_options(model: Model, run: Run, out: Path | None = None) -> Sample:
    """Return the options of `fmwc sample` that draw a run."""
    values: dict[str, Any] = {name: value for name, value in run.options.items() if value != ""}
    chosen = values.pop("check", None)
    values |= {"no_check": True} if chosen == "none" else {"check": int(chosen)} if chosen else {}
    values |= {"label": int(values["label"])} if "label" in values else {}
    values |= {"network": model.network, "judge": model.judge}
    return Sample(model.checkpoint, out or run.samples, **values)


def _level_of(path: Trajectory) -> dict[str, Any]:
    """Return the confidence, if there is one, and the score of one sample."""
    confidence = path.confidence
    return {"confidence": None if confidence is None else float(confidence[0]), "score": float(path.score()[0])}


def kept_of(run: Run, kept: Any) -> int:
    """Return how many samples are kept; raise unless this is a number of samples of the run."""
    count = run.facts.get("count", 0)
    if kept is None:
        return count
    if not isinstance(kept, int) or isinstance(kept, bool) or not 1 <= kept <= count:
        raise Refused(f"the number of samples to keep must be from 1 to {count:,}; got {str(kept)[:40]}", "kept")
    return kept


def _title(model: Model, options: dict[str, Any]) -> str:
    """Return what the page calls a run."""
    of = f" of class {options['label']}" if options.get("label") else ""
    formula = options.get("formula") or options.get("system") or ""
    return f"{options['count']:,} {model.words.noun}{of}{f' of {formula}' if formula else ''}, seed {options['seed']}"


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _identity(model: Model) -> str:
    return _identity_of(model.checkpoint)


def _identity_of(checkpoint: str) -> str:
    with suppress(FmwcError, OSError):
        return identity(checkpoint)
    return ""


def _how(model: Model, run: Trajectory) -> dict[str, Any]:
    """Return the options that reproduce a run."""
    record = replace(RunRecord.read(run.made, model.checkpoint), by="sample")
    return integration(record, model.domain, model.field)


# ---- states ----------------------------------------------------------------------------------------------------------


class _States:
    """The states of all samples at every step, as long as they are not too large."""

    def __init__(self, run: Run, plan: Plan) -> None:
        self.count, self.steps = plan.options.count, plan.options.steps
        self.batches: dict[int, list[Any]] | None = {}

    def add(self, first: int, x: Any) -> None:
        if self.batches is None:
            return
        size = sum(c[0].numel() * c.element_size() for c in channels(x).values())
        if size * self.count * self.steps > STATES:
            self.batches = None
            return
        self.batches.setdefault(first, []).append(tree_map(lambda c: c.detach().cpu().clone(), x))

    def write(self, file: Path) -> None:
        """Write the states, unless some are missing because the run was resumed."""
        batches = [states for _, states in sorted((self.batches or {}).items())]
        if not batches or any(len(states) != self.steps for states in batches):
            return
        whole = [tree_map(lambda *c: torch.stack(c, 1), *states) for states in batches]  # (B, steps, *)
        joined = tree_map(lambda *c: torch.cat(c).contiguous(), *whole)
        if len(next(iter(channels(joined).values()))) == self.count:
            write_tensors(file, channels(joined), {})


def _read_states(file: Path, one: Trajectory, sample: int) -> list[Any] | None:
    """Return the states of one sample from a file of :class:`_States`; `None` if there is none."""
    if not file.is_file():
        return None
    with safe_open(file, "pt") as tensors:
        found = {name: tensors.get_slice(name)[sample : sample + 1] for name in channels(one.x)}
    later = found.get(SINGLE, found)
    steps = len(one.grid) - 1
    device = one.grid.device
    return [one.x0, *(tree_map(lambda c, k=k: c[:, k].to(device), later) for k in range(steps))]
