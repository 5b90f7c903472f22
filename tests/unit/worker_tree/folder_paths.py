supported_pt_extensions = {".safetensors"}
base_path = models_dir = output_directory = temp_directory = input_directory = user_directory = "/nowhere"
folder_names_and_paths = {"checkpoints": (["/nowhere"], supported_pt_extensions), "custom_nodes": (["/nowhere/custom_nodes"], set())}


def get_folder_paths(name):
    return folder_names_and_paths[name][0]
