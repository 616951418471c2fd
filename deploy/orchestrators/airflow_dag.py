"""A release a night of the job `daily`, as a DAG of Airflow 3.

The Airflow variable `dpstream_project` is the folder of the project file; `dpstream` is on the
workers' PATH.  Both commands take the run's instant (`ts`, with its offset) and not the clock, so
that a catch-up, a backfill and a cleared run each do what their own night would have done.
"""

from datetime import UTC, datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.providers.standard.sensors.bash import BashSensor
from airflow.sdk import DAG

with DAG(
    dag_id="dpstream_daily",
    schedule="30 1 * * *",
    start_date=datetime(2024, 1, 2, tzinfo=UTC),
    catchup=True,
    max_active_runs=1,  # passes of a job follow each other
) as dag:
    # Exit code 4, also while files are missing: the same again later.  2 and 3 need a person; a
    # retry of them is refused again, and charges nothing.
    release = BashOperator(
        task_id="release",
        bash_command="cd {{ var.value.dpstream_project }} && "
        "dpstream run daily --through {{ ts }} --quiet",
        retries=8,
        retry_delay=timedelta(minutes=15),
    )
    # Exit code 5: not out yet.  It looks after a release that failed too: who releases by hand
    # ends the alarm.  What needs the figures comes behind it.
    out = BashSensor(
        task_id="out",
        bash_command="cd {{ var.value.dpstream_project }} && dpstream due daily --as-of {{ ts }}",
        retry_exit_code=5,
        mode="reschedule",
        poke_interval=timedelta(minutes=10),
        timeout=timedelta(hours=1),
        trigger_rule="all_done",
    )
    release >> out
