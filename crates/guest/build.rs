//! Generates the protocol's messages (prost) and their canonical JSON form (pbjson) from `proto/`, without `protoc`.

use std::{env, error::Error, path::PathBuf};

use prost_build::Config;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(["process.proto", "filesystem.proto"], ["proto"])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    Config::new()
        .compile_well_known_types()
        .extern_path(".google.protobuf", "::pbjson_types")
        .compile_fds(descriptors.clone())?;
    let mut json = pbjson_build::Builder::new();
    for file in descriptors.file {
        json.register_file_descriptor(file);
    }
    json.out_dir(out)
        .ignore_unknown_fields()
        .build(&[".process", ".filesystem"])?;
    Ok(())
}
