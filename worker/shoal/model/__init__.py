"""What is asked of a torch module or optimizer, whoever trains it."""
