"""What a trained model achieves: accuracies per class and on the tail, their intervals, and the summary of a run."""
