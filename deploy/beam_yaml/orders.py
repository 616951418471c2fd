"""Make the example's input: `python orders.py` writes orders.csv, a day of made-up orders."""

import csv
import random
from pathlib import Path

HEADER = ("order_id", "customer", "product", "ordered", "price")
PRODUCTS = ("apples", "bread", "cheese", "dates", "eggs")


def orders(seed: int = 1, number: int = 2_000) -> list[tuple[object, ...]]:
    """Orders of 800 customers; one in a hundred has no usable time, and becomes a dead letter."""
    draw = random.Random(seed)
    rows: list[tuple[object, ...]] = []
    for order in range(number):
        hour, minute = draw.randrange(24), draw.randrange(60)
        time = f"2024-01-01T{hour:02d}:{minute:02d}:00Z" if order % 100 else "unknown"
        product = draw.choices(PRODUCTS, weights=(8, 5, 3, 2, 1))[0]
        customer = f"c{draw.randrange(800):03d}"
        rows.append((order, customer, product, time, f"{draw.uniform(1, 60):.2f}"))
    return rows


if __name__ == "__main__":
    with Path("orders.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(HEADER)
        writer.writerows(orders())
