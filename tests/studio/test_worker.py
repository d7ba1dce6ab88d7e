"""The worker: order, cancelling, errors, and progress."""

import threading
import time

import pytest

from fmwc.errors import UsageError
from fmwc.studio.worker import REMEMBERED, Cancelled, Job, Worker


@pytest.fixture
def worker():
    told = []
    worker = Worker(lambda name, data: told.append(data))
    worker.heard = told
    yield worker
    worker.close()
    assert not worker.thread.is_alive()


def wait(*jobs):
    end = time.monotonic() + 20
    while any(job.state in ("waiting", "running") for job in jobs):
        assert time.monotonic() < end
        time.sleep(0.005)


def test_jobs_run_one_after_another(worker):
    begin, order = threading.Event(), []

    def work(number):
        def act(job):
            begin.wait(20)
            order.append(number)
            return number

        return act

    jobs = [worker.add(Job(f"job {n}", work(n))) for n in range(4)]
    assert [worker.shown(job)["place"] for job in jobs[1:]] == [1, 2, 3]
    begin.set()
    wait(*jobs)
    assert order == [job.result for job in jobs] == [0, 1, 2, 3]
    assert [one["id"] for one in worker.all()] == [job.id for job in reversed(jobs)]


def test_a_waiting_job_is_cancelled_at_once(worker):
    begin, ran, ended = threading.Event(), [], []
    first = worker.add(Job("first", lambda job: begin.wait(20)))
    second = worker.add(Job("second", ran.append, ended.append))
    third = worker.add(Job("third", lambda job: 3))
    worker.cancel(second)
    assert (second.state, ended) == ("cancelled", [second])
    begin.set()
    wait(first, third)
    assert not ran
    assert (first.state, third.state) == ("done", "done")


def test_a_running_job_is_cancelled_at_its_next_report(worker):
    running = threading.Event()

    def work(job):
        running.set()
        while True:
            job.progress(0.5)
            time.sleep(0.001)

    job = worker.add(Job("endless", work))
    assert running.wait(20)
    worker.cancel(job)
    wait(job)
    assert (job.state, job.error) == ("cancelled", "")
    after = worker.add(Job("after", lambda job: "fine"))
    wait(after)
    assert after.result == "fine"


def test_closing_cancels_what_runs():
    worker, running = Worker(lambda name, data: None), threading.Event()

    def work(job):
        running.set()
        while True:
            job.progress(0)
            time.sleep(0.001)

    job, never = worker.add(Job("endless", work)), worker.add(Job("never", lambda job: 1))
    assert running.wait(20)
    worker.close()
    assert (job.state, never.state) == ("cancelled", "waiting")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (UsageError("two\n lines"), "two lines"),
        (FileNotFoundError(2, "No such file", "x.cif"), "x.cif"),
        (RuntimeError("a\nb"), "unexpected RuntimeError: a (the terminal shows the traceback)"),
        (MemoryError(), "unexpected MemoryError"),
    ],
)
def test_errors_become_sentences_and_the_worker_goes_on(worker, error, words, capsys):
    def work(job):
        raise error

    job, after = worker.add(Job("fails", work)), worker.add(Job("after", lambda job: 1))
    wait(job, after)
    assert (job.state, after.state) == ("failed", "done")
    assert words in job.error
    assert "\n" not in job.error
    assert ("Traceback" in capsys.readouterr().err) == job.error.startswith("unexpected")


def test_progress_estimates_the_time_left():
    job = Job("half", lambda job: None)
    job.progress(0, "drawing")
    assert job.left is None
    job.begun -= 30
    job.progress(0.25)
    assert job.left == pytest.approx(90, rel=0.01)
    job.progress(7)
    assert (job.share, job.left) == (1, 0)
    job.progress(0, "judging")
    assert (job.stage, job.left) == ("judging", None)
    with job.bar("checks", 4) as show:
        show(1)
        show(2)
        assert job.share == 0.75
    job.stop.set()
    with pytest.raises(Cancelled):
        job.progress(0.5)


def test_progress_is_not_told_too_often(worker):
    def work(job):
        for n in range(20_000):
            job.progress(n / 20_000, "counting")

    wait(worker.add(Job("many", work)))
    assert 3 <= len(worker.heard) < 40


def test_old_jobs_are_forgotten(worker):
    jobs = [worker.add(Job(str(n), lambda job: None)) for n in range(REMEMBERED + 50)]
    wait(*jobs)
    last = worker.add(Job("last", lambda job: None))
    wait(last)
    assert len(worker.jobs) == REMEMBERED + 1
    assert jobs[0].id not in worker.jobs
