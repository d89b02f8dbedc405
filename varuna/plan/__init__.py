"""Plans and schedules: who holds which sections, and what a stage does next. No torch."""

from varuna.plan.encode import decode_choice, encode_choice
from varuna.plan.layout import PlanChoice, simple_plan
from varuna.plan.render import render_plan, render_schedule
from varuna.plan.schedule import SCHEDULES, StageSchedule, pipeline_schedules, stage_schedule
from varuna.plan.simulate import (
    Simulation,
    StageTimes,
    TaskSpan,
    constant_durations,
    ideal_makespan,
    simulate_step,
)
from varuna.plan.state import StageState, next_task
from varuna.spec import Task, TaskKind

__all__ = [
    "SCHEDULES",
    "PlanChoice",
    "Simulation",
    "StageSchedule",
    "StageState",
    "StageTimes",
    "Task",
    "TaskKind",
    "TaskSpan",
    "constant_durations",
    "decode_choice",
    "encode_choice",
    "ideal_makespan",
    "next_task",
    "pipeline_schedules",
    "render_plan",
    "render_schedule",
    "simple_plan",
    "simulate_step",
    "stage_schedule",
]
