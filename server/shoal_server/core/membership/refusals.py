"""All refusals that the membership core makes, of calls and of members."""

from shoal_server.core.generations.conflicts import shorten_conflicts
from shoal_server.core.generations.progress import JobProgress
from shoal_server.core.generations.roster import Conflict, Generation, JobSpec, Step
from shoal_server.core.membership.events import MemberEvent, Refusal, RefusalKind


def not_a_member(job: str, event: MemberEvent, generation: Generation) -> Refusal:
    return Refusal(
        kind=RefusalKind.FENCED,
        what=f"{event.member_id} is not a member of job {job}",
        seen="a process that never joined, that left, or that was declared lost",
        expected=f"a process that has joined; the current generation is {generation}",
        fix="Join again.",
    )


def drained(job: str, member_id: str, reason: str) -> Refusal:
    return Refusal(
        kind=RefusalKind.DRAINED,
        what=f"{member_id} has left job {job}",
        seen=reason,
        expected="no further calls from this member: the others train without it",
    )


def replaced(event: MemberEvent, incarnation: str, generation: Generation) -> Refusal:
    return Refusal(
        kind=RefusalKind.FENCED,
        what=f"{event.member_id} was replaced by a newer process",
        seen="an earlier process of that name",
        expected=f"its newest process; the current generation is {generation}",
        fix="End this process.",
        replaced_by=incarnation,
    )


def bad_spec(job: str, problem: str) -> Refusal:
    return Refusal(
        kind=RefusalKind.SPEC,
        what=f"job {job} cannot have these bounds",
        seen=problem,
        fix="Set 1 <= min_members <= desired_members <= max_members, and last_call_s to at"
        " least 0.",
    )


def other_bounds(seen: JobSpec, expected: JobSpec) -> Refusal:
    return Refusal(
        kind=RefusalKind.CONFLICT,
        what=f"job {expected.job} has other bounds",
        seen=_bounds(seen),
        expected=_bounds(expected),
        fix="Start every worker of a job with the same --min and --max (torchrun: --nnodes, and"
        " last_call_timeout in --rdzv-conf).",
    )


def roster_too_large(job: str, num_members: int, problem: str) -> Refusal:
    return Refusal(
        kind=RefusalKind.SPEC,
        what=f"a generation of {num_members} members of job {job} could not be kept in etcd",
        seen=problem,
        expected="a record that etcd accepts",
        fix="Use fewer members, or shorter names of hosts and members.",
    )


def empty_proposal(member_id: str) -> Refusal:
    return Refusal(
        kind=RefusalKind.SPEC,
        what=f"{member_id} proposed nothing",
        expected="the fields that all members must agree on",
    )


def finished(job: str, reason: str) -> Refusal:
    return Refusal(
        kind=RefusalKind.FINISHED,
        what=f"job {job} is finished",
        seen=reason,
        expected="a job that still has work to do",
        fix="Run it again with `shoal run --fresh` (`shoal rm` removes it), or give another"
        " job name.",
    )


def stopped(job: str, how: str, reason: str) -> Refusal:
    return Refusal(
        kind=RefusalKind.STOPPED,
        what=f"job {job} {how}",
        seen=reason,
        expected="a job that runs",
        fix=f"`shoal retry {job}` lets members join again: the job continues from its state;"
        " `shoal run --fresh` starts it over.",
    )


def not_over(job: str, reason: str) -> Refusal:
    return Refusal(
        kind=RefusalKind.SPEC,
        what=f"job {job} is not over: it can be joined",
        seen=reason,
        expected="a job that failed, was stopped, lost its state, or has no members",
        fix=f"`shoal stop {job}` ends it at a step boundary.",
    )


def cleared(job: str) -> Refusal:
    return Refusal(
        kind=RefusalKind.SPEC,
        what=f"job {job} cannot continue from where it was",
        seen="its generations, samples and parameters were removed: it has been over for too long",
        expected="a job that was over for less than the coordinator's --retention-s",
        fix=f"`shoal retry {job} --from-scratch` lets it begin at step 0.",
    )


def of_an_earlier_run(job: str, seen: str) -> Refusal:
    return Refusal(
        kind=RefusalKind.FINISHED,
        what=f"the run of job {job} that this process belongs to is over: the job was started over",
        seen=seen,
        expected="a process of the current run",
        fix="End this process.",
    )


def state_lost(job: str, progress: JobProgress, seen: str) -> Refusal:
    reached = f"step {progress.reached}" if progress.reached else "its first steps"
    return Refusal(
        kind=RefusalKind.STATE_LOST,
        what=f"the state of job {job} is lost: it had reached {reached}, in generation"
        f" {progress.trained_in}, and no member holds it any more",
        seen=seen,
        expected="a member that holds it, or a checkpoint that every member sees",
        fix="Run it with --fresh: it then starts from the newest checkpoint if distribute() has"
        " checkpoints=shoal.Checkpoints(...), else from step 0.",
    )


def cannot_bring_up(job: str, member_id: str, num_tries: int, error: str) -> Refusal:
    return Refusal(
        kind=RefusalKind.BRING_UP,
        what=f"{member_id} could not bring up a generation of job {job} in {num_tries} tries,"
        " and is left out",
        seen=error,
        expected="a member that reaches its first collective",
        fix="Its log has the traceback. Fix the cause, then start it under another name.",
    )


def no_checkpoint(member_id: str, step: Step, others: str) -> Refusal:
    return Refusal(
        kind=RefusalKind.STATE_LOST,
        what=f"{member_id} does not see the checkpoint of step {step}, from which the others go on",
        expected=f"the checkpoint that {others} see",
        fix="Give every member the same directory for checkpoints, on storage that all share.",
    )


def conflict(job: str, conflicts: tuple[Conflict, ...]) -> Refusal:
    conflicts = shorten_conflicts(conflicts)
    return Refusal(
        kind=RefusalKind.CONFLICT,
        what=f"members of job {job} differ",
        seen="; ".join(str(c) for c in conflicts),
        expected="the same value in every member",
        fix=next(
            (fix for each in conflicts if (fix := each.fix or _FIXES.get(each.field, ""))),
            "Give every worker the same script, arguments, environment and versions of libraries,"
            " and look in the script for what makes the named values differ.",
        ),
        conflicts=conflicts,
    )


_FIXES = {
    "schema": "The scripts make models that differ in the named entry: give every worker the same"
    " script, arguments and versions of libraries, and build the model from nothing that differs by"
    " process or host. Names that a library counts (Keras: dense, dense_2) depend on the models"
    " that the process made before: give the layers names.",
    "optimizer": "Give the optimizer the same class, groups and hyperparameters in every worker,"
    " whatever its rank or host.",
    "dataset_content": "The data sets differ: each worker makes its own, and these are of one size"
    " but hold different samples. Seed what draws them: train_test_split(..., random_state=0),"
    " random_split(..., generator=torch.Generator().manual_seed(0)); sort a list of files"
    " (docs/data.md).",
}
"""Advice by field, for conflicts in digests."""


def bad_devices(member_id: str, problem: str) -> Refusal:
    return Refusal(
        kind=RefusalKind.SPEC,
        what=f"{member_id} cannot have these devices",
        seen=problem,
        expected="at least 1 device of the kind that it states, and no more than a host can have",
    )


def confined(job: str, conflict: Conflict) -> Refusal:
    return Refusal(
        kind=RefusalKind.CONFLICT,
        what=f"job {job} spans several hosts, and a member's address works on one host only",
        seen=str(conflict),
        expected="addresses that the other hosts reach",
        fix="Give every worker the coordinator's address as other hosts see it, or set"
        " SHOAL_ADDRESS.",
        conflicts=(conflict,),
    )


def unreachable(job: str, member_id: str, seen: str) -> Refusal:
    return Refusal(
        kind=RefusalKind.UNREACHABLE,
        what=f"{member_id} and others of job {job} cannot reach each other",
        seen=seen,
        expected="every member to reach every other over TCP",
        fix="Look at firewalls between the hosts and at SHOAL_ADDRESS, then start it again.",
    )


OWN_CODE_FIX = (
    'put code that takes long between steps into `with session.pause("validation"):`,'
    " and the others wait for it"
)


def in_own_code(reason: str) -> Refusal:
    return Refusal(
        kind=RefusalKind.TIMEOUT,
        what=reason,
        expected="the next step, or session.pause",
        fix=OWN_CODE_FIX[0].upper() + OWN_CODE_FIX[1:] + ".",
    )


def pause_over(paused: str, limit_s: float) -> Refusal:
    return Refusal(
        kind=RefusalKind.TIMEOUT,
        what=paused,
        seen="no end of the pause",
        expected=f"session.pause to end within its limit_s={limit_s:g}",
        fix="Give session.pause(reason, limit_s=...) the time that the code within it takes.",
    )


def timeout(reason: str) -> Refusal:
    return Refusal(kind=RefusalKind.TIMEOUT, what=reason)


def _bounds(spec: JobSpec) -> str:
    bounds = f"min={spec.min_members} max={spec.max_members} desired={spec.desired_members}"
    return f"{bounds} last_call_s={spec.last_call_s:g}" if spec.last_call_s else bounds
