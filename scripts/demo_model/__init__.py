"""Parts of the scripts that train and evaluate the embedded model (`eagleray/demo_model`)."""
