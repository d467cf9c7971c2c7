"""Files and tests that are not for NCCL ranks, and why. Of a test its mark `cpu_ranks` may say so, too."""

__all__ = ["CPU_RANKS"]

_ABSTAINING = "on GPUs a rank may abstain only with on_bad_step"
_CHUNKS = "on GPUs chunks of a bucket are larger"
_COMPILED = "torch.compile traces the mode by which what a test makes is on the GPU"
_CPU_WIRES = "about communicators of the CPU"
_HEARD_LATER = "on GPUs the others hear of a failure at the step: tests/health/test_gpu_faults.py"
_FLAT = "parameters lie in flat memory on CPU ranks only"
_HELD_BACK = "on GPUs what is held back is known a window later: tests/core/test_gpu_stress.py"
_HOST_WAITS = "on GPUs a wait orders streams, and the host waits inside CUDA, where no signal handler runs"
_NO_ELASTIC = "elastic ranks refuse NCCL"
_PACE = "on GPUs windows are timed by the device: tests/health/test_gpu_stragglers.py"
_RECORDED = "unasked, only what runs on the CPU is recorded"
_THREADS = "looks at what ranks that are threads leave in this process"
_LONG = "takes long, and test_contract.py and test_window.py have its laws"
CPU_RANKS = {
    f"{file}::{test}" if test else file: reason
    for reason, files in {
        _ABSTAINING: {
            "test_faulty_windows": ["test_every_window_is_told_in_its_own_place"],
            "test_abstaining": ["test_without_a_policy_too", "test_a_forward_that_was_given_up_spoils_no_other"],
            "test_skip_votes": [
                "test_by_default_a_window_is_skipped_from_which_a_rank_abstains",
                "test_a_scaler_does_not_by_a_rank_that_abstains",
                "test_a_skipped_step_is_not_told_of_twice",
                "test_whatever_happens_replicas_stay_equal",
            ],
        },
        _CHUNKS: {
            "test_memory": ["test_small_gradients_in_hand_are_bounded", "test_the_peak_is_not_above_torchs_with_views"]
        },
        _COMPILED: {
            "test_data_parallel": ["test_a_compiled_model_trains_to_the_same_numbers"],
            "test_edge_cases": ["test_a_compiled_module_is_averaged_like_any_other"],
        },
        _CPU_WIRES: {
            "test_bucket_tuner": [
                "test_pieces_add_up",
                "test_sizes_are_found_together_and_then_stay",
                "test_where_every_bucket_is_dear_there_is_one",
            ],
            "test_compression": ["test_ranks_of_a_host_send_once"],
            "test_cost_model": [""],
            "test_lazy_collectives": [""],
            "test_lost_communicator": [""],
            "test_phases": [""],
            "test_composed": [""],
            "test_failures": [""],
            "test_readers": ["test_an_interrupted_step_leaves_a_model_that_can_be_read"],
            "test_samples": ["test_only_the_files_of_the_last_collective_are_left"],
            "test_set_up": [""],
        },
        _FLAT: {
            "test_flat_parameters": [""],
            "test_readers": ["test_memory_that_a_thread_may_be_reading_is_not_freed_under_it"],
        },
        _HEARD_LATER: {
            "test_awaited_parameters": ["test_nobody_goes_on_with_half_of_the_parameters"],
            "test_left_out_forwards": [
                "test_an_error_in_the_place_of_a_forward_is_told",
                "test_an_iterator_that_is_kept_has_no_part_in_the_next_window",
            ],
            "test_local_knowledge": [
                "test_a_backward_that_fails_on_an_unusual_way_is_told",
                "test_a_loss_that_fails_leaves_nobody_waiting",
                "test_a_parameter_that_one_rank_trains_again_is_averaged_on_all",
                "test_a_rank_that_cannot_be_right_tells_the_others",
                "test_a_rank_that_is_refused_tells_the_others",
                "test_a_step_sees_gradients_of_what_is_trained_again",
                "test_models_that_share_a_failed_backward_stay_in_step",
                "test_ranks_that_count_and_ranks_that_do_not_are_told",
                "test_what_was_told_is_not_forgotten_with_the_window",
            ],
            "test_misuse": [
                "test_a_failure_is_told_whenever_buckets_start",
                "test_a_gradient_that_comes_too_late_on_one_rank_is_told_to_the_others",
                "test_after_a_failure_in_real_processes_training_goes_on_exactly",
                "test_after_a_failure_on_one_rank_the_others_name_it_and_training_goes_on_exactly",
                "test_all_failed_ranks_are_named",
                "test_without_zero_grad_a_failed_backward_stops_training",
            ],
            "test_sharded": ["test_an_optimizer_that_raises_on_one_rank_is_told_to_the_others"],
            "test_skip_votes": ["test_by_default_a_failed_backward_raises_on_all_ranks"],
            "test_window": ["test_a_bad_weight_on_one_rank_is_heard_by_all"],
        },
        _HELD_BACK: {
            "test_compression": [
                "test_what_was_applied_and_what_is_held_back_is_all_there_was",
                "test_nothing_is_lost_with_weights_that_change",
                "test_several_ranks_of_a_host_keep_that_law",
                "test_what_is_held_back_follows_the_scale_of_the_loss",
            ],
        },
        _HOST_WAITS: {
            "test_missing_step": ["test_a_rank_that_leaves_out_a_step_is_named_with_what_it_did"],
            "test_readers": [
                "test_after_ctrl_c_in_a_wait_the_model_can_be_saved",
                "test_a_handler_that_saves_waits_inside_of_a_wait",
            ],
        },
        _LONG: {"test_attack": [""], "test_random_programs": [""], "test_soak": [""]},
        _NO_ELASTIC: {
            "test_elastic": [
                "test_a_rank_that_lags_behind_gets_the_whole_state_of_rank_0_and_the_others_keep_theirs",
            ]
        },
        _PACE: {
            "test_recording": [
                "test_a_backward_that_sleeps_is_told_from_one_that_computes",
                "test_the_loop_waits_for_its_loader_or_for_itself",
            ],
            "test_stragglers": ["test_a_window_that_failed_has_a_number_too"],
        },
        _RECORDED: {
            "test_explain": ["test_a_sleep_in_one_layer_of_one_rank_is_the_first_advice"],
            "test_recording": [
                "test_a_folder_that_cannot_be_written_breaks_no_training",
                "test_a_model_that_is_only_evaluated_or_never_stepped_keeps_nothing",
                "test_all_models_of_a_process_are_written_at_its_end_each_to_a_file_of_its_own",
                "test_an_attached_model_is_recorded_and_explains_itself",
                "test_before_anything_was_recorded_it_says_so",
            ],
        },
        _THREADS: {
            "test_communicators": ["test_rounds_do_not_pile_up"],
            "test_data_loader": [
                "test_batches_go_to_the_device",
                "test_it_looks_like_the_loader_it_was_made_from",
                "test_the_epoch_is_passed_on",
                "test_torchdata_is_asked_for_when_it_is_missing",
            ],
            "test_edge_cases": ["test_gradients_that_have_a_graph_are_averaged"],
            "test_environment": ["test_the_first_of_every_node_go_first"],
            "test_interrupts": [""],
            "test_local_steps": [
                "test_a_round_that_the_communicator_breaks_changes_nothing_and_is_remembered",
                "test_bytes_are_those_of_one_model_every_so_many_steps",
                "test_no_parameter_is_written_before_all_have_come",
            ],
            "test_memory": [
                "test_ranks_that_are_threads_leave_torchs_class_as_it_was",
                "test_the_memory_is_free_at_once",
            ],
            "test_notebooks": ["test_an_accelerator_says_where_it_is_and_what_it_has"],
            "test_overlapped": [
                "test_an_interrupted_close_goes_on",
                "test_auto_says_what_it_chose",
                "test_the_state_may_be_asked_for_while_a_group_is_added",
            ],
            "test_samples": ["test_who_does_not_come_is_named_and_the_next_use_is_refused"],
            "test_testing": [""],
            "test_gradient_path": [""],
        },
        "CUDA does not survive a fork": {"test_forked": [""]},
        "about hosts": {"test_lab": [""]},
        "about the pools of ranks themselves": {"test_ranks": [""]},
        "compares with Accelerate on CPU ranks": {"test_like_accelerate": [""]},
        "kills and stops ranks, whom Gloo's connections tell of": {"test_watch": [""], "test_watch_ranks": [""]},
    }.items()
    for file, tests in files.items()
    for test in tests
}
