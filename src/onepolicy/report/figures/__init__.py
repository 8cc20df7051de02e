"""The figures of all pages. Each takes labelled series: a run, its arms, dumps or scorings."""
