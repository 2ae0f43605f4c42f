use super::*;
use crate::config::tests::REQUEST;
use crate::config::{Dialect, GroupConfig, GroupRequest, LayerConfig};
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::TensorView;
use crate::tensor::tests::view;
use crate::tensor::{Scales, Shape, Window};

/// 4 ranks, 16 experts, 64 tokens, 512 receive rows, hidden 512, bfloat16.
fn group() -> GroupConfig {
    GroupConfig::try_from(REQUEST).unwrap()
}

fn eager() -> GroupConfig {
    let request = GroupRequest { max_recv_tokens_per_rank: 0, num_topk: 2, dialect: Dialect::TE, ..REQUEST };
    GroupConfig::try_from(request).unwrap()
}

fn zero_copy() -> GroupConfig {
    GroupConfig::try_from(GroupRequest { zero_copy: 1, ..REQUEST }).unwrap()
}

fn layer() -> LayerConfig {
    LayerConfig::parse("layer_config", 2, 8).unwrap()
}

const PREPARED: Prepared = Prepared { num_tokens: 10, index_dtype: DType::Int64, recv_total: None };

fn prepare() -> Prepare {
    Prepare {
        topk_idx: view("topk_idx", DType::Int64, &[10, 2]),
        token_counts: Some(view("token_counts", DType::Int32, &[4])),
        total: None,
    }
}

fn dispatch() -> Dispatch {
    Dispatch {
        topk_idx: Some(view("topk_idx", DType::Int64, &[10, 2])),
        tokens: view("tokens", DType::BFloat16, &[10, 512]),
        topk_weights: Some(view("topk_weights", DType::Float32, &[10, 2])),
        recv_tokens: view("recv_tokens", DType::BFloat16, &[512, 512]),
        recv_topk_weights: Some(view("recv_topk_weights", DType::Float32, &[512])),
    }
}

fn combine() -> Combine {
    Combine {
        expert_out: view("expert_out", DType::BFloat16, &[512, 512]),
        result: view("result", DType::BFloat16, &[10, 512]),
    }
}

fn dispatch_bwd() -> DispatchBwd {
    DispatchBwd {
        grad: view("grad", DType::BFloat16, &[512, 512]),
        g_recv_topk_weights: Some(view("g_recv_topk_weights", DType::Float32, &[512])),
        grad_tokens: view("grad_tokens", DType::BFloat16, &[10, 512]),
        grad_topk_weights: Some(view("grad_topk_weights", DType::Float32, &[10, 2])),
    }
}

fn combine_bwd() -> CombineBwd {
    CombineBwd {
        grad: view("grad", DType::BFloat16, &[10, 512]),
        grad_expert_out: view("grad_expert_out", DType::BFloat16, &[512, 512]),
    }
}

/// Calls as their checks leave them.
impl Dispatch {
    fn checked(mut self, group: &GroupConfig, layer: &LayerConfig, prepared: Prepared) -> Result<Self> {
        self.check(group, layer, prepared).map(|()| self)
    }
}

impl Combine {
    fn checked(mut self, group: &GroupConfig, prepared: Prepared) -> Result<Self> {
        self.check(group, prepared).map(|()| self)
    }
}

impl DispatchBwd {
    fn checked(mut self, group: &GroupConfig, layer: &LayerConfig, prepared: Prepared) -> Result<Self> {
        self.check(group, layer, prepared).map(|()| self)
    }
}

impl CombineBwd {
    fn checked(mut self, group: &GroupConfig, prepared: Prepared) -> Result<Self> {
        self.check(group, prepared).map(|()| self)
    }
}

/// MXFP8 data with scales of `scale_sizes`.
fn mxfp8(name: &'static str, sizes: &[usize], scale_sizes: &[usize]) -> TensorView {
    let shape = Shape::new(scale_sizes).unwrap();
    let scales = Scales { dtype: DType::Float8E8M0, shape, data: 0x2000, window: None };
    TensorView { scales: Some(scales), ..view(name, DType::Float8E4M3, sizes) }
}

fn mxfp8_dispatch() -> Dispatch {
    Dispatch {
        tokens: mxfp8("tokens", &[10, 512], &[10, 16]),
        recv_tokens: mxfp8("recv_tokens", &[512, 512], &[512, 16]),
        ..dispatch()
    }
}

/// A change, and what the refusal's text has to contain.
type Case<C> = (fn(&mut C), &'static str);

/// Applies each change to a fresh `call` and expects the refusal's text to contain what stands beside it.
fn refused<C, R>(call: impl Fn() -> C, check: impl Fn(C) -> Result<R>, cases: &[Case<C>]) {
    check(call()).map(|_| ()).unwrap();
    for (change, expected) in cases {
        let mut changed = call();
        change(&mut changed);
        let text = check(changed).map(|_| ()).unwrap_err().to_string();
        assert!(text.contains(expected), "{text:?} lacks {expected:?}");
    }
}

#[test]
fn prepare_rules() {
    assert_eq!(prepare().check(&group(), &layer()).unwrap(), PREPARED);
    let mut most = prepare();
    most.topk_idx = view("topk_idx", DType::Int64, &[64, 2]);
    assert_eq!(most.check(&group(), &layer()).unwrap().num_tokens, 64);
    refused(
        prepare,
        |call| call.check(&group(), &layer()),
        &[
            (|c| c.topk_idx = view("topk_idx", DType::Int64, &[20]), "topk_idx must be 2D [T, top_k], got 1D [20]"),
            (
                |c| c.topk_idx = view("topk_idx", DType::Int64, &[10, 3]),
                "topk_idx must have the registered top_k, 2, columns, got [10, 3]",
            ),
            (
                |c| c.topk_idx = view("topk_idx", DType::Int64, &[65, 2]),
                "topk_idx must have at most max_tokens_per_rank rows, 64, got 65",
            ),
            (|c| c.topk_idx.dtype = DType::Float32, "topk_idx must have dtype int64 or int32, got float32"),
            (|c| c.topk_idx.data = 0, "topk_idx must have data"),
            (|c| c.topk_idx.data = 4, "topk_idx must start at a multiple of 8 bytes, got address 0x4"),
            (
                |c| c.token_counts = Some(view("token_counts", DType::Int32, &[3])),
                "token_counts must have an entry for each of the 4 local experts, got 3; a rank has num_experts / ep_size experts, 16 / 4",
            ),
            (
                |c| c.token_counts = Some(view("token_counts", DType::Float32, &[4])),
                "token_counts must have dtype int32 or int64, got float32",
            ),
            (
                |c| c.total = Some(view("total", DType::Int64, &[1])),
                "total must have the dtype of token_counts, int32, got int64",
            ),
            (|c| c.total = Some(view("total", DType::Int32, &[0])), "total must have an entry, got 0"),
            (|c| c.total = Some(view("total", DType::Int32, &[1, 1])), "total must be 1D [1], got 2D [1, 1]"),
        ],
    );
}

#[test]
fn no_tokens_and_no_data_are_fine() {
    let mut call = prepare();
    call.topk_idx = view("topk_idx", DType::Int32, &[0, 2]);
    (call.topk_idx.data, call.token_counts) = (0, None);
    let prepared = call.check(&group(), &layer()).unwrap();
    assert_eq!(prepared, Prepared { num_tokens: 0, index_dtype: DType::Int32, recv_total: None });
    let mut call = combine();
    call.result = view("result", DType::BFloat16, &[0, 512]);
    call.result.data = 0;
    call.checked(&group(), prepared).unwrap();
}

#[test]
fn dispatch_rules() {
    refused(
        dispatch,
        |call| call.checked(&group(), &layer(), PREPARED),
        &[
            (
                |c| c.tokens = view("tokens", DType::BFloat16, &[5120]),
                "tokens must be 2D [T, hidden_dim], got 1D [5120]",
            ),
            (
                |c| c.tokens = view("tokens", DType::BFloat16, &[1, 10, 512]),
                "tokens must be 2D [T, hidden_dim], got 3D [1, 10, 512]",
            ),
            (
                |c| c.tokens = view("tokens", DType::BFloat16, &[9, 512]),
                "tokens must have as many rows as the prepared topk_idx, 10, got [9, 512]",
            ),
            (
                |c| c.tokens = view("tokens", DType::Float32, &[10, 512]),
                "tokens must have rows of at most 1024 bytes (the group's hidden_dim 512 in bfloat16), got 2048 bytes",
            ),
            (|c| c.tokens = view("tokens", DType::BFloat16, &[10, 4]), "multiple of 8 elements and of 16 bytes, got 4"),
            (|c| c.tokens = view("tokens", DType::Float32, &[10, 4]), "multiple of 8 elements and of 16 bytes, got 4"),
            (|c| c.tokens = view("tokens", DType::BFloat16, &[10, 0]), "multiple of 8 elements and of 16 bytes, got 0"),
            (
                |c| c.tokens.dtype = DType::Float8E4M3,
                "tokens must have dtype bfloat16 or float16 or float32, got float8_e4m3",
            ),
            (|c| c.tokens.data = 0x1008, "tokens must start at a multiple of 16 bytes, got address 0x1008"),
            (
                |c| c.recv_tokens = view("recv_tokens", DType::BFloat16, &[512 * 512]),
                "recv_tokens must be 2D [recv_T, hidden_dim], got 1D [262144]",
            ),
            (
                |c| c.recv_tokens = view("recv_tokens", DType::BFloat16, &[511, 512]),
                "recv_tokens must have at least max_recv_tokens_per_rank rows, 512, got [511, 512]",
            ),
            (
                |c| c.recv_tokens = view("recv_tokens", DType::BFloat16, &[512, 256]),
                "recv_tokens must have the token rows' width, 512, got [512, 256]; give both the same width; the group's hidden_dim is 512",
            ),
            (
                |c| c.recv_tokens.dtype = DType::Float16,
                "recv_tokens must have the dtype of tokens, bfloat16, got float16",
            ),
            (|c| c.recv_tokens.data = 0, "recv_tokens must have data"),
            (
                |c| c.topk_weights = Some(view("topk_weights", DType::BFloat16, &[10, 2])),
                "topk_weights must have dtype float32, got bfloat16",
            ),
            (
                |c| c.topk_weights = Some(view("topk_weights", DType::Float32, &[10, 4])),
                "topk_weights must have the registered top_k, 2, columns, got [10, 4]",
            ),
            (
                |c| c.recv_topk_weights = Some(view("recv_topk_weights", DType::Float32, &[511])),
                "recv_topk_weights must have at least max_recv_tokens_per_rank entries, 512, got 511",
            ),
            (
                |c| c.recv_topk_weights = Some(view("recv_topk_weights", DType::Float32, &[512, 1])),
                "recv_topk_weights must be 1D [recv_T], got 2D [512, 1]",
            ),
            (|c| c.recv_topk_weights = None, "recv_topk_weights must be given when topk_weights is"),
            (|c| c.topk_weights = None, "topk_weights must be given when recv_topk_weights is"),
            (|c| c.topk_idx = None, "topk_idx must be given with topk_weights"),
            (
                |c| c.topk_idx = Some(view("topk_idx", DType::Int32, &[10, 2])),
                "topk_idx must have the dtype given to nvte_ep_prepare, int64, got int32",
            ),
        ],
    );
}

#[test]
fn larger_receive_buffers_are_cut() {
    let mut call = dispatch();
    call.recv_tokens = view("recv_tokens", DType::BFloat16, &[1024, 512]);
    call.recv_topk_weights = Some(view("recv_topk_weights", DType::Float32, &[2000]));
    let call = call.checked(&group(), &layer(), PREPARED).unwrap();
    assert_eq!(call.recv_tokens.shape.sizes(), [512, 512]);
    assert_eq!(call.recv_topk_weights.unwrap().shape.sizes(), [512]);
    let mut call = dispatch_bwd();
    call.grad = view("grad", DType::BFloat16, &[513, 512]);
    call.g_recv_topk_weights = Some(view("g_recv_topk_weights", DType::Float32, &[513]));
    let call = call.checked(&group(), &layer(), PREPARED).unwrap();
    assert_eq!(call.grad.shape.sizes(), [512, 512], "the kernels clear as many staging rows as grad has");
    assert_eq!(call.g_recv_topk_weights.unwrap().shape.sizes(), [512]);
}

#[test]
fn combine_rules() {
    // An odd number of 16 bytes.
    let mut narrow = combine();
    narrow.expert_out = view("expert_out", DType::BFloat16, &[512, 24]);
    narrow.result = view("result", DType::BFloat16, &[10, 24]);
    narrow.checked(&group(), PREPARED).unwrap();
    refused(
        combine,
        |call| call.checked(&group(), PREPARED),
        &[
            (
                |c| c.result = view("result", DType::BFloat16, &[64, 512]),
                "result must have as many rows as the prepared topk_idx, 10, got [64, 512]",
            ),
            (|c| c.result.dtype = DType::Float16, "result must have the dtype of expert_out, bfloat16, got float16"),
            (
                |c| c.expert_out = view("expert_out", DType::BFloat16, &[512, 1024]),
                "expert_out must have the token rows' width, 512, got [512, 1024]; give both the same width; the group's hidden_dim is 512",
            ),
            (
                |c| c.expert_out = view("expert_out", DType::BFloat16, &[100, 512]),
                "expert_out must have at least max_recv_tokens_per_rank rows, 512, got [100, 512]",
            ),
            (
                |c| c.expert_out = mxfp8("expert_out", &[512, 512], &[512, 16]),
                "expert_out must be unscaled (NVTE_DELAYED_TENSOR_SCALING); scaled rows are moved, not summed, got MXFP8",
            ),
            (|c| c.result.data = 8, "result must start at a multiple of 16 bytes"),
        ],
    );
}

#[test]
fn gradient_rules() {
    refused(
        dispatch_bwd,
        |call| call.checked(&group(), &layer(), PREPARED),
        &[
            (
                |c| c.grad_topk_weights = Some(view("grad_topk_weights", DType::Float32, &[10, 3])),
                "grad_topk_weights must have the registered top_k, 2, columns, got [10, 3]",
            ),
            (
                |c| c.g_recv_topk_weights = Some(view("g_recv_topk_weights", DType::Float32, &[10])),
                "g_recv_topk_weights must have at least max_recv_tokens_per_rank entries, 512, got 10",
            ),
            (|c| c.g_recv_topk_weights = None, "g_recv_topk_weights must be given when grad_topk_weights is"),
            (|c| c.grad_topk_weights = None, "grad_topk_weights must be given when g_recv_topk_weights is"),
            (
                |c| c.grad_tokens = view("grad_tokens", DType::Float16, &[10, 512]),
                "grad_tokens must have the dtype of grad, bfloat16, got float16",
            ),
        ],
    );
    let call = DispatchBwd { g_recv_topk_weights: None, grad_topk_weights: None, ..dispatch_bwd() };
    call.checked(&group(), &layer(), PREPARED).unwrap();
    refused(
        combine_bwd,
        |call| call.checked(&group(), PREPARED),
        &[
            (
                |c| c.grad = view("grad", DType::BFloat16, &[11, 512]),
                "grad must have as many rows as the prepared topk_idx, 10, got [11, 512]",
            ),
            (
                |c| c.grad_expert_out = mxfp8("grad_expert_out", &[512, 512], &[512, 16]),
                "grad_expert_out must have the dtype of grad, bfloat16, got float8_e4m3",
            ),
            (
                |c| c.grad = mxfp8("grad", &[10, 544], &[10, 17]),
                "grad must have a row width that is a multiple of 512 in MXFP8, got 544 elements, so rows of 17 scales",
            ),
            (
                |c| c.grad_expert_out.dtype = DType::Float32,
                "grad_expert_out must have the dtype of grad, bfloat16, got float32",
            ),
            (
                |c| c.grad_expert_out = view("grad_expert_out", DType::BFloat16, &[511, 512]),
                "grad_expert_out must have at least max_recv_tokens_per_rank rows, 512, got [511, 512]",
            ),
        ],
    );
}

#[test]
fn zero_copy_takes_windows() {
    let windowed = |mut tensor: TensorView| {
        (tensor.window, tensor.data) = (Window::new(9, 4096), 0);
        tensor
    };
    let text = dispatch().checked(&zero_copy(), &layer(), PREPARED).unwrap_err().to_string();
    let expected = "recv_tokens_win.window must be a window, since the group is zero-copy and peers' rows are written in place, \
                    got NULL";
    assert_eq!(text, expected);
    let mut call = dispatch();
    call.recv_tokens = windowed(call.recv_tokens);
    call.checked(&zero_copy(), &layer(), PREPARED).unwrap();
    let text = combine().checked(&zero_copy(), PREPARED).unwrap_err().to_string();
    let expected = "expert_out_win.window must be a window, since the group is zero-copy and peers' rows are read in place, got NULL";
    assert_eq!(text, expected);
    let mut call = combine();
    call.expert_out = windowed(call.expert_out);
    call.checked(&zero_copy(), PREPARED).unwrap();
}

#[test]
fn scales_go_where_their_rows_go() {
    let mut call = mxfp8_dispatch();
    (call.recv_tokens.window, call.recv_tokens.data) = (Window::new(9, 4096), 0);
    let text = |group: GroupConfig| call.checked(&group, &layer(), PREPARED).unwrap_err().to_string();
    assert_eq!(
        text(group()),
        "recv_tokens.rowwise_scale_inv must lie in memory of nvte_ep_ext_symm_alloc or nvte_ep_ext_window_register exactly if \
         the rows have a window, got address 0x2000"
    );
    let te = GroupConfig { dialect: Dialect::TE, ..group() };
    assert!(text(te).ends_with(" must be a window exactly if the rows have one, got NULL"), "{}", text(te));
}

#[test]
fn mxfp8_rules() {
    refused(
        mxfp8_dispatch,
        |call| call.checked(&group(), &layer(), PREPARED),
        &[
            (
                |c| c.recv_tokens.scales = None,
                "recv_tokens must be MXFP8 (NVTE_MXFP8_1D_SCALING), as tokens is, got unscaled",
            ),
            (
                |c| c.tokens = mxfp8("tokens", &[10, 512], &[12, 16]),
                "tokens.rowwise_scale_inv must have shape [10, 16], unpadded and unswizzled, got [12, 16]",
            ),
            (
                |c| c.recv_tokens = mxfp8("recv_tokens", &[512, 512], &[500, 16]),
                "recv_tokens.rowwise_scale_inv must have a row for each of the 512 received rows, got [500, 16]",
            ),
            (
                |c| c.tokens = mxfp8("tokens", &[10, 256], &[10, 8]),
                "tokens must have a row width that is a multiple of 512 in MXFP8, got 256 elements, so rows of 8 scales",
            ),
            (
                |c| c.tokens = mxfp8("tokens", &[10, 1024], &[10, 32]),
                "got 1056 bytes with its scales ([10, 1024] of float8_e4m3)",
            ),
            (
                |c| c.tokens.scales.as_mut().unwrap().dtype = DType::Float32,
                "tokens.rowwise_scale_inv must have dtype float8_e8m0, got float32",
            ),
            (|c| c.tokens.scales.as_mut().unwrap().data = 0, "tokens.rowwise_scale_inv must have data"),
            (
                |c| c.recv_tokens.dtype = DType::Float8E5M2,
                "recv_tokens must have the dtype of tokens, float8_e4m3, got float8_e5m2",
            ),
            (|c| c.tokens.dtype = DType::BFloat16, "tokens must have dtype float8_e4m3 or float8_e5m2, got bfloat16"),
        ],
    );
    let mut call = mxfp8_dispatch();
    call.recv_tokens = mxfp8("recv_tokens", &[600, 512], &[640, 16]);
    let scales = call.checked(&group(), &layer(), PREPARED).unwrap().recv_tokens.scales.unwrap();
    assert_eq!(scales.shape.sizes(), [512, 16]);
    let mut call = dispatch();
    call.recv_tokens = mxfp8("recv_tokens", &[512, 512], &[512, 16]);
    call.recv_tokens.dtype = DType::BFloat16;
    let text = call.checked(&group(), &layer(), PREPARED).unwrap_err().to_string();
    assert_eq!(text, "recv_tokens must be unscaled, as tokens is, got MXFP8");
}

#[test]
fn eager_buffers_are_as_the_caller_sized_them() {
    let mut call = dispatch();
    call.recv_tokens = view("recv_tokens", DType::BFloat16, &[37, 512]);
    call.recv_topk_weights = Some(view("recv_topk_weights", DType::Float32, &[37]));
    let call = call.checked(&eager(), &layer(), PREPARED).unwrap();
    assert_eq!(call.recv_tokens.shape.sizes(), [37, 512]);
    let mut empty = dispatch();
    empty.recv_tokens = view("recv_tokens", DType::BFloat16, &[0, 512]);
    empty.recv_topk_weights = Some(view("recv_topk_weights", DType::Float32, &[0]));
    empty.recv_tokens.data = 0;
    empty.checked(&eager(), &layer(), PREPARED).unwrap();
    // The same, with weights that arrived as no tensor: still a forward pass on this rank, as on the others.
    let nothing = Dispatch { recv_topk_weights: None, ..empty };
    let nothing = nothing.checked(&eager(), &layer(), PREPARED).unwrap();
    assert_eq!(nothing.recv_topk_weights.unwrap().shape.sizes(), [0]);
    let mut call = DispatchBwd { g_recv_topk_weights: None, ..dispatch_bwd() };
    call.grad = view("grad", DType::BFloat16, &[0, 512]);
    let call = call.checked(&eager(), &layer(), PREPARED).unwrap();
    assert_eq!(call.g_recv_topk_weights.unwrap().shape.sizes(), [0]);
    // Exactly the step's total fits; one row less, in any call, does not.
    let total = |recv_total| Prepared { recv_total: Some(recv_total), ..PREPARED };
    let rows = |name| view(name, DType::BFloat16, &[37, 512]);
    let weights = Some(view("weights", DType::Float32, &[37]));
    let dispatch = Dispatch { recv_tokens: rows("recv_tokens"), recv_topk_weights: weights, ..dispatch() };
    let combine_37 = Combine { expert_out: rows("expert_out"), ..combine() };
    let dispatch_bwd_37 = DispatchBwd { grad: rows("grad"), g_recv_topk_weights: weights, ..dispatch_bwd() };
    let combine_bwd = CombineBwd { grad_expert_out: rows("grad_expert_out"), ..combine_bwd() };
    let texts = |total| {
        [
            dispatch.checked(&eager(), &layer(), total).err(),
            combine_37.checked(&eager(), total).err(),
            dispatch_bwd_37.checked(&eager(), &layer(), total).err(),
            combine_bwd.checked(&eager(), total).err(),
        ]
        .map(|error| error.map(|error| error.to_string()))
    };
    assert_eq!(texts(total(37)), [const { None }; 4]);
    let names = ["recv_tokens", "expert_out", "grad", "grad_expert_out"];
    for (text, name) in texts(total(38)).iter().zip(names) {
        let expected = format!(
            "{name} must have at least the rows that this rank receives in this step, 38, got [37, 512]; size it by \
             nvte_ep_ext_recv_totals, or by the total that prepare reported"
        );
        assert_eq!(text.as_deref(), Some(&*expected));
    }
    let beyond = &[4 * 64 * 2 + 1, 512];
    let mut call = combine();
    call.expert_out = view("expert_out", DType::BFloat16, beyond);
    call.checked(&eager(), PREPARED).unwrap();
    let mut call = dispatch_bwd();
    call.grad = view("grad", DType::BFloat16, beyond);
    call.g_recv_topk_weights = Some(view("g_recv_topk_weights", DType::Float32, &beyond[..1]));
    let text = call.checked(&eager(), &layer(), PREPARED).unwrap_err().to_string();
    assert!(text.starts_with("grad must have at most ep_size * max_tokens_per_rank * num_topk rows, 512"), "{text}");
    // So many are taken, and more by an engine without that limit.
    dispatch_bwd().checked(&eager(), &layer(), PREPARED).unwrap();
    let native = GroupConfig { limits: &crate::limits::NATIVE, ..eager() };
    call.checked(&native, &layer(), PREPARED).unwrap();
    let mut call = dispatch_bwd();
    call.grad = view("grad", DType::BFloat16, &[37, 512]);
    call.g_recv_topk_weights = Some(view("g_recv_topk_weights", DType::Float32, &[36]));
    let text = call.checked(&eager(), &layer(), PREPARED).unwrap_err().to_string();
    assert_eq!(text, "g_recv_topk_weights must have an entry for each row of grad, 37, got 36");
}
