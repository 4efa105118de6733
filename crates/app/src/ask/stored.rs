//! Tensor headers beside the config: two accounts of one model, which must agree.

use std::collections::{BTreeMap, BTreeSet};

use vramcast_core::dtype::DType;
use vramcast_core::model::Model;
use vramcast_core::source::StoredType;
use vramcast_core::units::show_count;

use crate::failure::{Failure, Place};
use crate::fetch::TensorFiles;

/// Refuses files whose tensors have other sizes than the config's model; says where a model that was only assumed has
/// another number of parameters than they.
pub(super) fn compare(model: &Model, files: &TensorFiles, assumed: bool) -> Result<Option<String>, Failure> {
    // Without a readable config there is nothing to compare; whoever asks hears of it.
    let Ok(inventory) = model.inventory() else { return Ok(None) };
    if assumed {
        let stored: u64 = files.tensors().map(|tensor| tensor.elements()).fold(0, u64::saturating_add);
        let total = inventory.total();
        return Ok((stored != total).then(|| {
            format!("its files hold {} elements, what is assumed has {}", show_count(stored), show_count(total))
        }));
    }
    let named = inventory.parameters.iter().map(|one| (one.name.as_str(), one.shape.sizes().to_vec()));
    let shapes = vramcast_core::order::map(named);
    if let Some(missing) = missing_layer(&shapes, files) {
        return Err(contradiction(format!("config.json and the files contradict each other: {missing}")));
    }
    for file in &files.files {
        // Packed weights have shapes of their own.
        let plain = |kind: &StoredType| matches!(kind, StoredType::Plain(DType::F32 | DType::BF16 | DType::F16));
        for tensor in file.tensors.iter().filter(|tensor| plain(&tensor.stored)) {
            let Some(expected) = shapes.get(tensor.name.as_str()) else { continue };
            if *expected != tensor.shape {
                let said = format!(
                    "config.json and {} contradict each other: {} is {expected:?} by the config and {:?} in the file",
                    file.name, tensor.name, tensor.shape
                );
                return Err(contradiction(said));
            }
        }
    }
    Ok(None)
}

fn contradiction(said: String) -> Failure {
    Failure::bad_input(said).hint("give the config.json that belongs to these files").at(Place::Config(String::new()))
}

/// A layer that the config has and the files have not, though they have the same tensor of another layer.
fn missing_layer(shapes: &BTreeMap<&str, Vec<u64>>, files: &TensorFiles) -> Option<String> {
    let stored: BTreeSet<&str> = files.tensors().map(|tensor| tensor.name.as_str()).collect();
    shapes.keys().find_map(|name| {
        let parts: Vec<&str> = name.split('.').collect();
        let at = parts.iter().position(|part| part.parse::<u32>().is_ok_and(|layer| layer > 0))?;
        let first = parts.iter().enumerate().map(|(i, part)| if i == at { "0" } else { part }).collect::<Vec<_>>();
        let lacks = !stored.contains(name) && stored.contains(first.join(".").as_str());
        // A layer that has some of its tensors is another matter: layers differ.
        let layer = format!("{}.", parts[..=at].join("."));
        let whole = lacks && !stored.iter().any(|name| name.starts_with(&layer));
        whole.then(|| format!("{} is a layer by the config and in none of the files", layer.trim_end_matches('.')))
    })
}

/// Refuses a config whose model has more parameters than its files have elements, by the hub's count; says where it has far fewer.
pub(super) fn count(model: &Model, elements: u64, assumed: bool) -> Result<Option<String>, Failure> {
    /// Heads that a checkpoint lacks and buffers that it has are smaller parts of a model than this.
    const ONE_PART_IN: u64 = 20;
    let Ok(inventory) = model.inventory() else { return Ok(None) };
    let total = inventory.total();
    let (counted, built) = (show_count(elements), show_count(total));
    if assumed && elements != total {
        return Ok(Some(format!("its files hold {counted} elements, what is assumed has {built}")));
    }
    if elements < total - total / ONE_PART_IN {
        let said = format!(
            "config.json and the files contradict each other: {built} parameters by the config, {counted} in the files"
        );
        return Err(contradiction(said));
    }
    Ok((elements > total.saturating_add(total / ONE_PART_IN))
        .then(|| format!("its files hold {counted} elements, of which the model has {built}")))
}
