"""What runs at a client: controller, model store, data manager and the training engines."""
