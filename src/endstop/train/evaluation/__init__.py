"""What a trained model can do, stopping included."""
