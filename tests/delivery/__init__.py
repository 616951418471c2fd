"""Generated schedules of delivery through the stages that wait (F5)."""
