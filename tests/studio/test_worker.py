"""The worker: order, cancelling, errors, and progress."""

import threading
import time

import pytest

from fmwc.errors import UsageError
from fmwc.studio.worker import Job, Worker


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
