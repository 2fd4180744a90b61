"""What FP8 does to a training run: figures of each cast, alarms, a record and its report."""
