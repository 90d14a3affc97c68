"""One property a file."""

from tests.sim.invariants.alarm_before_hang import AlarmBeforeHang
from tests.sim.invariants.all_have_told import AllHaveTold
from tests.sim.invariants.budgets import Budgets
from tests.sim.invariants.committed_first import CommittedFirst
from tests.sim.invariants.doubts_cost_nothing import DoubtsCostNothing
from tests.sim.invariants.evidence_before_blame import EvidenceBeforeBlame
from tests.sim.invariants.exit_codes import ExitCodes
from tests.sim.invariants.honest_success import HonestSuccess
from tests.sim.invariants.liveness import Liveness
from tests.sim.invariants.names_are_owned import NamesAreOwned
from tests.sim.invariants.no_false_loss import NoFalseLoss
from tests.sim.invariants.no_step_lost import NoStepLost
from tests.sim.invariants.nobody_forgotten import NobodyForgotten
from tests.sim.invariants.old_workers_gone import OldWorkersGone
from tests.sim.invariants.one_owner import OneOwner
from tests.sim.invariants.one_plan import OnePlan
from tests.sim.invariants.only_the_fit import OnlyTheFit
from tests.sim.invariants.only_the_stuck import OnlyTheStuck
from tests.sim.invariants.only_trusted_states import OnlyTrustedStates
from tests.sim.invariants.quarantine_holds import QuarantineHolds
from tests.sim.invariants.quiet_standbys import QuietStandbys
from tests.sim.invariants.same_state import SameState
from tests.sim.invariants.stable_slots import StableSlots
from tests.sim.invariants.state_in_reach import StateInReach
from tests.sim.invariants.state_is_newest import StateIsNewest
from tests.sim.invariants.witnesses_and_lease import WitnessesAndLease
from tests.sim.oracle import Invariant

ALL: tuple[type[Invariant], ...] = (
    OnePlan,
    CommittedFirst,
    StableSlots,
    OneOwner,
    OldWorkersGone,
    NamesAreOwned,
    NoFalseLoss,
    WitnessesAndLease,
    QuarantineHolds,
    QuietStandbys,
    HonestSuccess,
    Budgets,
    EvidenceBeforeBlame,
    ExitCodes,
    NobodyForgotten,
    Liveness,
    AllHaveTold,
    StateInReach,
    StateIsNewest,
    SameState,
    AlarmBeforeHang,
    OnlyTheStuck,
    DoubtsCostNothing,
    OnlyTheFit,
    OnlyTrustedStates,
    NoStepLost,
)
