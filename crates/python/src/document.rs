//! A document as Python's own values, without a text in between, and each part only when somebody looks at it.

use pyo3::exceptions::{PyKeyError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use serde_json::{Map, Value, json};

/// The document of a command: a dict whose parts are made when they are asked for. A timeline of hundreds of points costs
/// nothing to who wants the totals.
#[pyclass(frozen, module = "vramcast._core")]
pub(crate) struct Document(pub(crate) Value);

#[pymethods]
impl Document {
    fn __getitem__<'py>(&self, py: Python<'py>, key: &str) -> PyResult<Bound<'py, PyAny>> {
        let part = self.0.get(key).ok_or_else(|| PyKeyError::new_err(key.to_owned()))?;
        to_python(py, part)
    }

    fn __contains__(&self, key: &str) -> bool {
        self.0.get(key).is_some()
    }

    /// The names of its parts, in order.
    fn keys(&self) -> Vec<&str> {
        self.0.as_object().into_iter().flat_map(|entries| entries.keys()).map(String::as_str).collect()
    }

    /// All of it.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.0)
    }
}

/// Objects become dicts in the same order, lists lists, numbers ints where they are whole.
fn to_python<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::Null => py.None().into_bound(py),
        Value::Bool(truth) => truth.into_pyobject(py)?.to_owned().into_any(),
        Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(whole), _) => whole.into_pyobject(py)?.into_any(),
            (None, Some(negative)) => negative.into_pyobject(py)?.into_any(),
            (None, None) => number.as_f64().into_pyobject(py)?,
        },
        Value::String(text) => PyString::new(py, text).into_any(),
        Value::Array(items) => {
            let items: Vec<_> = items.iter().map(|item| to_python(py, item)).collect::<PyResult<_>>()?;
            PyList::new(py, items)?.into_any()
        }
        Value::Object(entries) => {
            let dict = PyDict::new(py);
            for (key, entry) in entries {
                dict.set_item(PyString::intern(py, key), to_python(py, entry)?)?;
            }
            dict.into_any()
        }
    })
}

/// Plain values of Python as a tree: dicts, lists, texts, numbers, truth values and None.
pub(crate) fn from_python(value: &Bound<'_, PyAny>) -> PyResult<Value> {
    if value.is_none() {
        return Ok(Value::Null);
    }
    if let Ok(truth) = value.cast::<PyBool>() {
        return Ok(json!(truth.is_true()));
    }
    if value.is_instance_of::<PyInt>() {
        let whole = value.extract::<u64>();
        return Ok(whole.map_or_else(|_| json!(value.extract::<i64>().unwrap_or(i64::MIN)), |number| json!(number)));
    }
    if value.is_instance_of::<PyFloat>() {
        return Ok(json!(value.extract::<f64>()?));
    }
    if value.is_instance_of::<PyString>() {
        return Ok(Value::String(value.extract()?));
    }
    if let Ok(dict) = value.cast::<PyDict>() {
        let mut object = Map::new();
        for (key, item) in dict {
            object.insert(key.extract()?, from_python(&item)?);
        }
        return Ok(Value::Object(object));
    }
    if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        let items: PyResult<Vec<Value>> = value.try_iter()?.map(|item| from_python(&item?)).collect();
        return Ok(Value::Array(items?));
    }
    Err(PyTypeError::new_err(format!("{value} is no plain value")))
}
