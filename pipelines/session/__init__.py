"""Sessions on tables whose records have their own budgets: files, questions and answers."""
