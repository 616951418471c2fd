"""The account of a data set: charges, answers that were charged once, and the lineage of stores."""
