"""Sessions over tables whose records have budgets: the table's files, queries and answers."""
