"""Plan a run: time, memory and communication on any number and type of GPUs; and write a recipe for a dataset."""
