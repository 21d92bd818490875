"""What a user meets: the Serve application, its config, the HTTP ingress and the default model."""
