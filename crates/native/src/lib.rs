//! The Python module `agentenv._native`: layers and memory images for the control plane. `_native.pyi` is its contract.
//!
//! This file translates arguments and results, and decides nothing; the work is done by the modules below, without the
//! interpreter lock.

mod digest;
mod failure;
mod inspect;
mod interruptible;
mod layers;
mod memory;
mod open;
mod output;
mod pages;
mod pipeline;
mod reading;

use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use failure::{About, Failure, LayerError, Outcome};
use interruptible::Cancellation;
use layers::{Form, Made};
use memory::Packing;
use overlaybd::zfile::Algorithm;
use overlaybd::Uuid;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Half of the records that other implementations accept.
const DENSE_AFTER: u64 = 500_000;

/// See the module's contract.
#[derive(IntoPyObject)]
struct WrittenLayer {
    digest: String,
    size: u64,
    uuid: String,
    parent_uuid: Option<String>,
    virtual_size: u64,
    records: u64,
    zero_records: u64,
    data_bytes: u64,
}

impl From<Made> for WrittenLayer {
    fn from(made: Made) -> Self {
        Self {
            digest: made.published.digest.unwrap_or_default(),
            size: made.published.size,
            uuid: made.committed.uuid.to_string(),
            parent_uuid: inspect::text_of(made.parent_uuid),
            virtual_size: made.committed.virtual_size,
            records: made.committed.records,
            zero_records: made.committed.zero_records,
            data_bytes: made.committed.data_bytes,
        }
    }
}

fn uuid_of(text: Option<&str>) -> Outcome<Option<Uuid>> {
    let parse = |text: &str| {
        Uuid::try_parse(text).map_err(|_| Failure::invalid(format!("'{text}' is not a UUID")))
    };
    text.map(parse).transpose()
}

fn form(
    py: Python<'_>,
    zfile: Option<&str>,
    tar: bool,
    uuid: Option<&str>,
    parent_uuid: Option<&str>,
    replace: bool,
) -> PyResult<Form> {
    let algorithm = |name: &str| match name {
        "lz4" => Ok(Algorithm::Lz4),
        "zstd" => Ok(Algorithm::Zstd),
        _ => Err(Failure::invalid(format!(
            "'{name}' is no compression; there are lz4 and zstd"
        ))),
    };
    let parse = || -> Outcome<Form> {
        let zfile = zfile.map(algorithm).transpose()?;
        let (uuid, parent_uuid) = (uuid_of(uuid)?, uuid_of(parent_uuid)?);
        Ok(Form {
            zfile,
            tar,
            uuid,
            parent_uuid,
            replace,
        })
    };
    parse().map_err(|failure| failure.raise(py))
}

#[pyfunction]
#[pyo3(name = "inspect", signature = (path, *, index = None))]
fn inspect_file(
    py: Python<'_>,
    path: PathBuf,
    index: Option<PathBuf>,
) -> PyResult<inspect::LayerFacts> {
    interruptible::run(py, |cancel| {
        inspect::inspect(&path, index.as_deref(), cancel)
    })
}

#[pyfunction]
fn verify(py: Python<'_>, path: PathBuf) -> PyResult<inspect::VerifiedLayer> {
    interruptible::run(py, |cancel| inspect::verify(&path, cancel))
}

#[pyfunction]
fn virtual_size(py: Python<'_>, stack: Vec<PathBuf>) -> PyResult<u64> {
    interruptible::run(py, |cancel| reading::virtual_size(&stack, cancel))
}

#[pyfunction]
fn read(
    py: Python<'_>,
    stack: Vec<PathBuf>,
    offset: u64,
    length: u64,
) -> PyResult<Bound<'_, PyBytes>> {
    let bytes = interruptible::run(py, |cancel| reading::read(&stack, offset, length, cancel))?;
    Ok(PyBytes::new(py, &bytes))
}

#[pyfunction]
#[pyo3(signature = (stack, descriptor, offset = 0, length = None))]
fn cat(
    py: Python<'_>,
    stack: Vec<PathBuf>,
    descriptor: i32,
    offset: u64,
    length: Option<u64>,
) -> PyResult<u64> {
    if descriptor < 0 {
        return Err(Failure::invalid(format!("{descriptor} is no open file")).raise(py));
    }
    // SAFETY: the descriptor is not negative; it is borrowed for this one duplication, which fails if it is closed.
    let borrowed = unsafe { BorrowedFd::borrow_raw(descriptor) };
    let sink = borrowed
        .try_clone_to_owned()
        .about(Path::new("output"))
        .map_err(|failure| failure.raise(py))?;
    reading::cat(py, &stack, &sink, offset, length)
}

#[pyfunction]
#[pyo3(signature = (source, out, *, zfile = None, tar = false, uuid = None, parent_uuid = None, replace = false))]
#[allow(clippy::too_many_arguments)] // they are Python's, by name
fn create_from_raw(
    py: Python<'_>,
    source: PathBuf,
    out: PathBuf,
    zfile: Option<&str>,
    tar: bool,
    uuid: Option<&str>,
    parent_uuid: Option<&str>,
    replace: bool,
) -> PyResult<WrittenLayer> {
    let form = form(py, zfile, tar, uuid, parent_uuid, replace)?;
    let made = interruptible::run(py, |cancel| layers::from_raw(&source, &out, &form, cancel))?;
    Ok(made.into())
}

#[pyfunction]
#[pyo3(signature = (layers, out, *, zfile = None, tar = false, uuid = None, parent_uuid = None, replace = false))]
#[allow(clippy::too_many_arguments)] // they are Python's, by name
fn merge(
    py: Python<'_>,
    layers: Vec<PathBuf>,
    out: PathBuf,
    zfile: Option<&str>,
    tar: bool,
    uuid: Option<&str>,
    parent_uuid: Option<&str>,
    replace: bool,
) -> PyResult<WrittenLayer> {
    let form = form(py, zfile, tar, uuid, parent_uuid, replace)?;
    let made = interruptible::run(py, |cancel| layers::merge(&layers, &out, &form, cancel))?;
    Ok(made.into())
}

#[pyfunction]
#[pyo3(signature = (data, index, out, *, zfile = None, tar = false, uuid = None, parent_uuid = None, replace = false))]
#[allow(clippy::too_many_arguments)] // they are Python's, by name
fn commit(
    py: Python<'_>,
    data: PathBuf,
    index: Option<PathBuf>,
    out: PathBuf,
    zfile: Option<&str>,
    tar: bool,
    uuid: Option<&str>,
    parent_uuid: Option<&str>,
    replace: bool,
) -> PyResult<WrittenLayer> {
    let form = form(py, zfile, tar, uuid, parent_uuid, replace)?;
    let made = interruptible::run(py, |cancel| {
        layers::commit_upper(&data, index.as_deref(), &out, &form, cancel)
    })?;
    Ok(made.into())
}

#[pyfunction]
#[pyo3(signature = (image, parents, out, *, uuid = None, page = 4096, dense_after = DENSE_AFTER, replace = false, cancellation = None))]
#[allow(clippy::too_many_arguments)] // they are Python's, by name
fn pack_memory(
    py: Python<'_>,
    image: PathBuf,
    parents: Vec<PathBuf>,
    out: PathBuf,
    uuid: Option<&str>,
    page: u64,
    dense_after: u64,
    replace: bool,
    cancellation: Option<Bound<'_, Cancellation>>,
) -> PyResult<WrittenLayer> {
    let until = cancellation.as_ref().map(Bound::get);
    let uuid = uuid_of(uuid).map_err(|failure| failure.raise(py))?;
    let packing = Packing {
        uuid,
        page,
        dense_after,
        replace,
    };
    let made = interruptible::run_until(py, until, |cancel| {
        memory::pack(&image, &parents, &out, &packing, cancel)
    })?;
    Ok(made.into())
}

#[pyfunction]
#[pyo3(signature = (stack, out, *, replace = false, cancellation = None))]
fn unpack(
    py: Python<'_>,
    stack: Vec<PathBuf>,
    out: PathBuf,
    replace: bool,
    cancellation: Option<Bound<'_, Cancellation>>,
) -> PyResult<u64> {
    let until = cancellation.as_ref().map(Bound::get);
    interruptible::run_until(py, until, |cancel| {
        memory::unpack(&stack, &out, replace, cancel)
    })
}

#[pyfunction]
#[pyo3(signature = (stack, image, *, cancellation = None))]
fn fill(
    py: Python<'_>,
    stack: Vec<PathBuf>,
    image: PathBuf,
    cancellation: Option<Bound<'_, Cancellation>>,
) -> PyResult<u64> {
    let until = cancellation.as_ref().map(Bound::get);
    interruptible::run_until(py, until, |cancel| memory::fill(&stack, &image, cancel))
}

#[pyfunction]
#[pyo3(signature = (image, out, *, cancellation = None))]
fn fill_from_image(
    py: Python<'_>,
    image: PathBuf,
    out: PathBuf,
    cancellation: Option<Bound<'_, Cancellation>>,
) -> PyResult<u64> {
    let until = cancellation.as_ref().map(Bound::get);
    interruptible::run_until(py, until, |cancel| {
        memory::fill_from_image(&image, &out, cancel)
    })
}

#[pyfunction]
#[pyo3(signature = (image, out, *, replace = false, cancellation = None))]
fn copy_image(
    py: Python<'_>,
    image: PathBuf,
    out: PathBuf,
    replace: bool,
    cancellation: Option<Bound<'_, Cancellation>>,
) -> PyResult<u64> {
    let until = cancellation.as_ref().map(Bound::get);
    interruptible::run_until(py, until, |cancel| {
        memory::copy_image(&image, &out, replace, cancel)
    })
}

#[pyfunction]
#[pyo3(signature = (image, stack, *, page = 4096, cancellation = None))]
fn compare(
    py: Python<'_>,
    image: PathBuf,
    stack: Vec<PathBuf>,
    page: u64,
    cancellation: Option<Bound<'_, Cancellation>>,
) -> PyResult<Vec<(u64, u64)>> {
    let until = cancellation.as_ref().map(Bound::get);
    interruptible::run_until(py, until, |cancel| {
        memory::compare(&image, &stack, page, cancel)
    })
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("LayerError", module.py().get_type::<LayerError>())?;
    module.add_class::<Cancellation>()?;
    module.add_function(wrap_pyfunction!(inspect_file, module)?)?;
    module.add_function(wrap_pyfunction!(verify, module)?)?;
    module.add_function(wrap_pyfunction!(virtual_size, module)?)?;
    module.add_function(wrap_pyfunction!(read, module)?)?;
    module.add_function(wrap_pyfunction!(cat, module)?)?;
    module.add_function(wrap_pyfunction!(create_from_raw, module)?)?;
    module.add_function(wrap_pyfunction!(merge, module)?)?;
    module.add_function(wrap_pyfunction!(commit, module)?)?;
    module.add_function(wrap_pyfunction!(pack_memory, module)?)?;
    module.add_function(wrap_pyfunction!(unpack, module)?)?;
    module.add_function(wrap_pyfunction!(fill, module)?)?;
    module.add_function(wrap_pyfunction!(fill_from_image, module)?)?;
    module.add_function(wrap_pyfunction!(copy_image, module)?)?;
    module.add_function(wrap_pyfunction!(compare, module)?)?;
    Ok(())
}
