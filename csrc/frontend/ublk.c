// SPDX-License-Identifier: Apache-2.0
/*
 * The ublk front end: a block device /dev/ublkbN of which this process is the driver.
 *
 * Requests reach us with their data: the kernel copies a WRITE's pages to the tag's own buffer,
 * which is page aligned and locked, before it hands the request over, and a READ's pages from
 * there when we give the result back. (The other way, UBLK_F_USER_COPY, takes one more system call
 * per request for the same copy.)
 *
 * With user recovery the device stays when we die: requests wait, those that we had are issued
 * again, and a successor that has prepared itself takes the device over (docs/frontends.md).
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sysinfo.h>
#include <time.h>
#include <unistd.h>

#include "frontend/ublk.h"
#include "frontend/ublk_control.h"
#include "frontend/ublk_queue.h"
#include "util/util.h"

#define SECTOR_BYTES 512u
#define PAGE_SHIFT   12
/*
 * Largest READ and WRITE. Every buffer has this size and all are locked; swap writes 128 KiB at
 * most where pages are small, and reads less.
 */
#define REQUEST_BYTES_MAX (256u * 1024u)
/* A page is a microsecond of the queue's thread, which takes no other request meanwhile. */
#define DISCARD_BYTES_MAX (64u << 20)
/* More threads than this bring nothing: the engine's receivers do as much of the work. */
#define QUEUES_MAX      4u
#define QUEUE_DEPTH_MIN 8u
#define RECOVERY_FLAGS  (UBLK_F_USER_RECOVERY | UBLK_F_USER_RECOVERY_REISSUE)
/* Flags of a device with another way of moving data than ours. */
#define FOREIGN_FLAGS                                                                              \
	(UBLK_F_SUPPORT_ZERO_COPY | UBLK_F_NEED_GET_DATA | UBLK_F_UNPRIVILEGED_DEV |               \
	 UBLK_F_USER_COPY | UBLK_F_ZONED)

struct ublk {
	isw_frontend base;  /* first */
	isw_engine *engine; /* NULL: everything fails */
	struct iswi_ublk_control control;
	struct ublksrv_ctrl_dev_info info;
	bool owned;    /* destroy removes the device: it is ours, not a predecessor's */
	bool serving;  /* the device was started, or taken over */
	int device_fd; /* /dev/ublkcN */
	void **descs;  /* a mapping of descs_bytes per queue, or NULL */
	size_t descs_bytes;
	struct iswi_ublk_queue *queues;
	uint16_t queues_made;
	/* Set by destroy, and by the first queue that ends unasked: one report (acq_rel). */
	atomic_bool ending;
};

static void queue_down(void *ctx, int error)
{
	struct ublk *fe = ctx;

	if (!atomic_exchange_explicit(&fe->ending, true, memory_order_acq_rel) &&
	    fe->engine != NULL)
		iswi_engine_frontend_down(fe->engine, error);
}

/* ---------------------------------------------------------------------- queues */

static int make_queues(struct ublk *fe, struct isw_error *error)
{
	int err;

	fe->queues = calloc(fe->info.nr_hw_queues, sizeof(*fe->queues));
	fe->descs = calloc(fe->info.nr_hw_queues, sizeof(*fe->descs));
	err = fe->queues == NULL || fe->descs == NULL ? -ENOMEM : 0;
	for (uint16_t i = 0; i < fe->info.nr_hw_queues && err == 0; i++) {
		struct iswi_ublk_queue *queue = &fe->queues[i];

		queue->engine = fe->engine;
		queue->number = i;
		queue->depth = fe->info.queue_depth;
		queue->request_bytes = fe->info.max_io_buf_bytes;
		queue->down = queue_down;
		queue->ctx = fe;
		fe->queues_made++;
		err = iswi_ublk_queue_start(queue);
		if (err == 0)
			err = iswi_ublk_queue_wait(queue, ISWI_UBLK_PARKED);
	}
	return err == 0 ? 0
			: iswi_error(error, err, "the ublk front end's queues: %s", strerror(-err));
}

static void free_queues(struct ublk *fe)
{
	for (uint16_t i = 0; i < fe->queues_made; i++)
		iswi_ublk_queue_stop(&fe->queues[i]);
	for (uint16_t i = 0; i < fe->queues_made; i++) {
		if (fe->descs[i] != NULL)
			munmap(fe->descs[i], fe->descs_bytes);
		iswi_ublk_queue_free(&fe->queues[i]);
	}
	fe->queues_made = 0;
	if (fe->device_fd >= 0)
		close(fe->device_fd);
	fe->device_fd = -1;
	free(fe->descs);
	free(fe->queues);
	fe->descs = NULL;
	fe->queues = NULL;
}

static size_t round_to_pages(size_t bytes)
{
	const size_t page = (size_t)sysconf(_SC_PAGESIZE);

	return (bytes + page - 1) / page * page;
}

/* Opens the device's own node, /dev/ublkcN; -EBUSY while another process has it open. */
static int open_node(struct ublk *fe, struct isw_error *error)
{
	char path[32];
	int err;

	snprintf(path, sizeof(path), "/dev/ublkc%u", fe->info.dev_id);
	fe->device_fd = open(path, O_RDWR | O_CLOEXEC);
	if (fe->device_fd >= 0)
		return 0;
	err = -errno;
	return iswi_error(error, err,
			  "%s cannot be opened: %s; in a container, share the host's /dev", path,
			  strerror(-err));
}

static int map_descs(struct ublk *fe)
{
	const size_t stride = round_to_pages(UBLK_MAX_QUEUE_DEPTH * sizeof(struct ublksrv_io_desc));

	fe->descs_bytes = round_to_pages(fe->info.queue_depth * sizeof(struct ublksrv_io_desc));
	for (uint16_t i = 0; i < fe->queues_made; i++) {
		void *descs = mmap(NULL, fe->descs_bytes, PROT_READ, MAP_SHARED | MAP_POPULATE,
				   fe->device_fd, UBLKSRV_CMD_BUF_OFFSET + (off_t)(i * stride));

		if (descs == MAP_FAILED)
			return -errno;
		fe->descs[i] = descs;
	}
	return 0;
}

/*
 * Maps each queue's descriptors, lets each queue fetch. All at once: who dies when one has fetched
 * and another has not leaves a device that Linux 6.12 gives to nobody else (see start_recovery).
 */
static int fetch(struct ublk *fe, struct isw_error *error)
{
	int err = open_node(fe, error);

	if (err != 0)
		return err;
	err = map_descs(fe);
	for (uint16_t i = 0; i < fe->queues_made && err == 0; i++)
		iswi_ublk_queue_order(&fe->queues[i], fe->device_fd, fe->descs[i]);
	for (uint16_t i = 0; i < fe->queues_made && err == 0; i++)
		err = iswi_ublk_queue_wait(&fe->queues[i], ISWI_UBLK_FETCHING);
	return err == 0 ? 0
			: iswi_error(error, err, "ublk device %u cannot be served: %s",
				     fe->info.dev_id, strerror(-err));
}

/* ------------------------------------------------------------------ a new device */

static void set_shape(struct ublk *fe, uint32_t queues, uint64_t identity)
{
	const uint32_t requests = iswi_engine_requests_max(fe->engine);
	uint32_t bytes = ISWI_MIN(iswi_engine_request_bytes_max(fe->engine), REQUEST_BYTES_MAX);

	if (queues == 0)
		queues = ISWI_MIN((uint32_t)get_nprocs(), QUEUES_MAX);
	queues = ISWI_MIN(queues, ISWI_MAX(requests / QUEUE_DEPTH_MIN, 1u));
	fe->info = (struct ublksrv_ctrl_dev_info){
		.nr_hw_queues = (uint16_t)queues,
		.queue_depth = (uint16_t)ISWI_MIN(requests / queues, UBLK_MAX_QUEUE_DEPTH),
		.max_io_buf_bytes = bytes,
		.dev_id = UINT32_MAX,
		.ublksrv_pid = -1,
		.flags = RECOVERY_FLAGS | UBLK_F_CMD_IOCTL_ENCODE,
		.ublksrv_flags = identity, /* kept by the kernel, of no meaning to it */
	};
}

static int add_device(struct ublk *fe, struct isw_error *error)
{
	int err = iswi_ublk_add(&fe->control, &fe->info);

	if (err == 0) {
		fe->owned = true;
		return 0;
	}
	if (err == -EACCES || err == -ENOSPC)
		return iswi_error(error, -ENOSPC,
				  "the kernel's limit of ublk devices is reached: remove one, or "
				  "raise /sys/module/ublk_drv/parameters/ublks_max");
	if (err == -EPERM)
		return iswi_error(error, err, "the kernel refuses to make a ublk device: %s",
				  strerror(-err));
	return iswi_error(error, err, "the kernel made no ublk device: %s", strerror(-err));
}

static int set_params(struct ublk *fe, struct isw_error *error)
{
	struct ublk_params params = {
		.types = UBLK_PARAM_TYPE_BASIC | UBLK_PARAM_TYPE_DISCARD,
		.basic =
			{
				.attrs = UBLK_ATTR_VOLATILE_CACHE | UBLK_ATTR_FUA,
				.logical_bs_shift = PAGE_SHIFT,
				.physical_bs_shift = PAGE_SHIFT,
				.io_opt_shift = PAGE_SHIFT,
				.io_min_shift = PAGE_SHIFT,
				.max_sectors = fe->info.max_io_buf_bytes / SECTOR_BYTES,
				.dev_sectors = iswi_engine_size_bytes(fe->engine) / SECTOR_BYTES,
			},
		.discard =
			{
				.discard_granularity = ISW_PAGE_BYTES,
				.max_discard_sectors = DISCARD_BYTES_MAX / SECTOR_BYTES,
				.max_write_zeroes_sectors = DISCARD_BYTES_MAX / SECTOR_BYTES,
				.max_discard_segments = 1,
			},
	};
	int err = iswi_ublk_set_params(&fe->control, fe->info.dev_id, &params);

	return err == 0 ? 0
			: iswi_error(error, err, "ublk device %u takes no parameters: %s",
				     fe->info.dev_id, strerror(-err));
}

static int start_device(struct ublk *fe, struct isw_error *error)
{
	int err = iswi_ublk_start(&fe->control, fe->info.dev_id);

	if (err != 0)
		return iswi_error(error, err, "ublk device %u did not start: %s", fe->info.dev_id,
				  strerror(-err));
	fe->serving = true;
	return 0;
}

/* ----------------------------------------------------------------- life and end */

/*
 * A device that is ours is ended while its queues still serve what is in progress: that gives
 * every command back, and with it ends the queues.
 */
static void fe_destroy(isw_frontend *frontend)
{
	struct ublk *fe = ISWI_CONTAINER(frontend, struct ublk, base);

	atomic_store_explicit(&fe->ending, true, memory_order_release);
	if (fe->owned)
		iswi_ublk_stop(&fe->control, fe->info.dev_id);
	free_queues(fe);
	if (fe->owned)
		iswi_ublk_del(&fe->control, fe->info.dev_id);
	iswi_ublk_control_close(&fe->control);
	free(fe);
}

static int fe_create(isw_engine *engine, struct ublk **fe_out, struct isw_error *error)
{
	struct ublk *fe = calloc(1, sizeof(*fe));
	int err;

	if (fe == NULL)
		return iswi_error(error, -ENOMEM, "no memory for the ublk front end");
	fe->base.ops = &iswi_ublk_ops;
	fe->engine = engine;
	fe->device_fd = -1;
	err = iswi_ublk_control_open(&fe->control, error);
	if (err != 0) {
		free(fe);
		return err;
	}
	*fe_out = fe;
	return 0;
}

/* Hands a front end that was made over, or undoes it. */
static int finish(struct ublk *fe, int err, isw_frontend **frontend_out)
{
	if (err != 0)
		fe_destroy(&fe->base);
	else
		*frontend_out = &fe->base;
	return err;
}

static int fe_start(isw_engine *engine, const struct isw_frontend_config *config,
		    isw_frontend **frontend_out, struct isw_error *error)
{
	struct ublk *fe;
	int err = fe_create(engine, &fe, error);

	if (err != 0)
		return err;
	set_shape(fe, config->queues, config->identity);
	err = add_device(fe, error); /* which may lower the number of queues */
	if (err == 0)
		err = set_params(fe, error);
	if (err == 0)
		err = make_queues(fe, error);
	if (err == 0)
		err = fetch(fe, error);
	if (err == 0)
		err = start_device(fe, error);
	return finish(fe, err, frontend_out);
}

/* --------------------------------------------------------- a predecessor's device */

static int explain_info(int code, uint32_t dev_id, struct isw_error *error)
{
	if (code == -ENODEV)
		return iswi_error(error, code, "there is no ublk device %u", dev_id);
	return iswi_error(error, code, "ublk device %u: %s", dev_id, strerror(-code));
}

static uint64_t size_of(struct iswi_ublk_control *control, uint32_t dev_id)
{
	struct ublk_params params;

	if (iswi_ublk_get_params(control, dev_id, &params) != 0)
		return 0;
	return params.basic.dev_sectors * SECTOR_BYTES;
}

static int check_identity(const struct ublksrv_ctrl_dev_info *info, uint64_t identity,
			  struct isw_error *error)
{
	if (info->ublksrv_flags != identity)
		return iswi_error(error, -ESTALE,
				  "ublk device %u is not this device's: somebody "
				  "else made it",
				  info->dev_id);
	if ((info->flags & RECOVERY_FLAGS) != RECOVERY_FLAGS || (info->flags & FOREIGN_FLAGS) != 0)
		return iswi_error(
			error, -EINVAL,
			"ublk device %u cannot be taken over: it was made with other flags "
			"(%#llx)",
			info->dev_id, (unsigned long long)info->flags);
	return 0;
}

/* Size and buffers have to be such as this engine can serve. */
static int check_shape(struct ublk *fe, struct isw_error *error)
{
	const struct ublksrv_ctrl_dev_info *info = &fe->info;
	const uint64_t requests = (uint64_t)info->nr_hw_queues * info->queue_depth;
	const uint64_t size_bytes = size_of(&fe->control, info->dev_id);

	if (size_bytes != iswi_engine_size_bytes(fe->engine))
		return iswi_error(error, -EINVAL,
				  "ublk device %u has %llu bytes where this device has %llu: it "
				  "cannot be taken over",
				  info->dev_id, (unsigned long long)size_bytes,
				  (unsigned long long)iswi_engine_size_bytes(fe->engine));
	if (requests > iswi_engine_requests_max(fe->engine) ||
	    info->max_io_buf_bytes > iswi_engine_request_bytes_max(fe->engine))
		return iswi_error(error, -EINVAL,
				  "ublk device %u has %u queues of %u requests of %u bytes: more "
				  "than device.requests_max and device.request of now allow; "
				  "set both as they were when it was started",
				  info->dev_id, info->nr_hw_queues, info->queue_depth,
				  info->max_io_buf_bytes);
	return 0;
}

/* engine NULL: everything will fail. */
static int fe_prepare(isw_engine *engine, const struct isw_frontend_config *config,
		      isw_frontend **frontend_out, struct isw_error *error)
{
	const uint32_t dev_id = config->device_id;
	struct ublk *fe;
	int err = fe_create(engine, &fe, error);

	if (err != 0)
		return err;
	err = iswi_ublk_get_info(&fe->control, dev_id, &fe->info);
	if (err != 0)
		explain_info(err, dev_id, error);
	else
		err = check_identity(&fe->info, config->identity, error);
	if (err == 0 && engine != NULL)
		err = check_shape(fe, error);
	if (err == 0)
		err = make_queues(fe, error);
	return finish(fe, err, frontend_out);
}

/* Numbers are used again: is it still the device that we prepared for? */
static int check_same(struct ublk *fe, struct isw_error *error)
{
	struct ublksrv_ctrl_dev_info now;
	int err = iswi_ublk_get_info(&fe->control, fe->info.dev_id, &now);

	if (err != 0)
		return explain_info(err, fe->info.dev_id, error);
	if (now.ublksrv_flags != fe->info.ublksrv_flags ||
	    now.ublksrv_pid != fe->info.ublksrv_pid || now.nr_hw_queues != fe->info.nr_hw_queues ||
	    now.queue_depth != fe->info.queue_depth ||
	    now.max_io_buf_bytes != fe->info.max_io_buf_bytes || now.flags != fe->info.flags)
		return iswi_error(error, -ESTALE,
				  "ublk device %u is not the one that was to be taken over: "
				  "process %d has made or taken it since",
				  fe->info.dev_id, now.ublksrv_pid);
	return 0;
}

/*
 * Linux 6.12 says that a device is quiesced a moment before its worker cancels the commands of the
 * dead process, and starts that worker once for each of its queues (ublk_quiesce_work_fn). What is
 * fetched before the last one has ended is cancelled, too, at any time later: seen. The workers are
 * on the system's work queue, so we wait for that; where we cannot, we give them time.
 */
static void let_cancel(struct ublk *fe)
{
	const struct timespec long_enough = {.tv_nsec = 50000000};

	if (iswi_ublk_settle(&fe->control) != 0)
		nanosleep(&long_enough, NULL);
}

/* 0 once nobody serves the device; -EBUSY: somebody does, -ENODEV: nobody ever will again. */
static int check_dead(struct ublk *fe, struct isw_error *error)
{
	struct ublksrv_ctrl_dev_info now;
	int err = iswi_ublk_get_info(&fe->control, fe->info.dev_id, &now);

	if (err != 0)
		return explain_info(err, fe->info.dev_id, error);
	if (now.state == UBLK_S_DEV_DEAD)
		return iswi_error(error, -ENODEV, "ublk device %u has been stopped by somebody",
				  fe->info.dev_id);
	if (now.state == UBLK_S_DEV_LIVE)
		return -EBUSY;
	/* One process at a time may open it: the dead one's rings are closed, and their file. */
	err = open_node(fe, error);
	if (err == 0)
		close(fe->device_fd);
	fe->device_fd = -1;
	return err;
}

/*
 * Whether a successor has begun to take over and died before it fetched: Linux 6.12 refuses to
 * begin again (ublk_ctrl_start_recovery: no queue is ready), and needs no second beginning either.
 */
static bool has_begun(struct ublk *fe)
{
	struct ublksrv_ctrl_dev_info now;

	return iswi_ublk_get_info(&fe->control, fe->info.dev_id, &now) == 0 &&
	       now.state == UBLK_S_DEV_QUIESCED &&
	       check_identity(&now, fe->info.ublksrv_flags, NULL) == 0;
}

static int begin_recovery(struct ublk *fe)
{
	int err;

	/* They must not find our commands where the dead one's were; no further one is started. */
	let_cancel(fe);
	err = iswi_ublk_start_recovery(&fe->control, fe->info.dev_id);
	return err == -EINVAL && has_begun(fe) ? 0 : err;
}

/*
 * Until the kernel has ended what the dead predecessor left: its rings, and requests under way.
 *
 * A process that dies from here on and before the last queue has fetched leaves a device without
 * server and is no longer as a server's death leaves it. Linux 6.12 does not mend that when the
 * dead one's file is closed, as later ones do, and from outside only the first half can be mended
 * (has_begun). Once it has mapped the descriptors, the kernel lets nobody else map them
 * (ublk_ch_mmap: ub->mm) without a new beginning, and where one queue of several has fetched a new
 * beginning is a fault in the kernel (ublk_queue_reinit: the others have no thread to forget). So
 * all that takes time comes before, and there is nothing between the two but the fetching.
 */
static int start_recovery(struct ublk *fe, uint32_t wait_ms_max, struct isw_error *error)
{
	const struct timespec tick = {.tv_nsec = 2000000};
	const uint64_t until_ns = iswi_now_ns() + wait_ms_max * 1000000ull;
	struct ublksrv_ctrl_dev_info now = {.ublksrv_pid = -1};
	int err;

	for (;;) {
		err = check_dead(fe, error);
		if (err != 0 && err != -EBUSY)
			return err;
		if (err == 0)
			err = begin_recovery(fe);
		if (err != -EBUSY || iswi_now_ns() > until_ns)
			break;
		nanosleep(&tick, NULL);
	}
	if (err == 0)
		return 0;
	if (err == -ENODEV)
		return explain_info(err, fe->info.dev_id, error);
	iswi_ublk_get_info(&fe->control, fe->info.dev_id, &now);
	if (err == -EBUSY)
		return iswi_error(error, err, "ublk device %u is still served by process %d",
				  fe->info.dev_id, now.ublksrv_pid);
	return iswi_error(error, err, "ublk device %u cannot be taken over: %s (state %u)",
			  fe->info.dev_id, strerror(-err), now.state);
}

static int fe_take_over(isw_frontend *frontend, uint32_t wait_ms_max, struct isw_error *error)
{
	struct ublk *fe = ISWI_CONTAINER(frontend, struct ublk, base);
	int err;

	if (fe->serving || fe->device_fd >= 0)
		return iswi_error(error, -EINVAL,
				  "this front end is not one that waits for a "
				  "ublk device");
	err = check_same(fe, error);
	if (err == 0)
		err = start_recovery(fe, wait_ms_max, error);
	if (err != 0)
		return err;
	err = fetch(fe, error);
	if (err != 0)
		return err;
	err = iswi_ublk_end_recovery(&fe->control, fe->info.dev_id);
	if (err != 0)
		return iswi_error(error, err, "ublk device %u was not given to this process: %s",
				  fe->info.dev_id, strerror(-err));
	fe->serving = true;
	fe->owned = true;
	return 0;
}

static int fe_rings(isw_frontend *frontend, int32_t *fds_out, uint32_t max)
{
	const struct ublk *fe = ISWI_CONTAINER(frontend, struct ublk, base);

	for (uint16_t i = 0; i < fe->queues_made && i < max; i++)
		fds_out[i] = fe->queues[i].ring.ring_fd;
	return fe->queues_made;
}

static void fe_info(const isw_frontend *frontend, struct isw_frontend_info *info_out)
{
	const struct ublk *fe = ISWI_CONTAINER(frontend, const struct ublk, base);

	info_out->size_bytes = fe->engine == NULL ? 0 : iswi_engine_size_bytes(fe->engine);
	info_out->requests_max = (uint32_t)fe->info.nr_hw_queues * fe->info.queue_depth;
	info_out->device_id = fe->info.dev_id;
}

const struct iswi_frontend_ops iswi_ublk_ops = {
	.name = "ublk",
	.start = fe_start,
	.destroy = fe_destroy,
	.info = fe_info,
	.prepare = fe_prepare,
	.take_over = fe_take_over,
	.rings = fe_rings,
};

/* ----------------------------------------------------------------- without an engine */

int isw_ublk_fail(uint32_t dev_id, uint64_t identity, uint32_t wait_ms_max,
		  isw_frontend **frontend_out, struct isw_error *error)
{
	const struct isw_frontend_config config = {.device_id = dev_id, .identity = identity};
	isw_frontend *frontend;
	int err = fe_prepare(NULL, &config, &frontend, error);

	*frontend_out = NULL;
	if (err != 0)
		return err;
	err = fe_take_over(frontend, wait_ms_max, error);
	if (err != 0) {
		fe_destroy(frontend);
		return err;
	}
	*frontend_out = frontend;
	return 0;
}

int isw_ublk_check(struct isw_error *error)
{
	struct iswi_ublk_control control;
	int err = iswi_ublk_control_open(&control, error);

	if (err == 0)
		iswi_ublk_control_close(&control);
	return err;
}

int isw_ublk_info(uint32_t dev_id, struct isw_ublk_info *info_out, struct isw_error *error)
{
	struct iswi_ublk_control control;
	struct ublksrv_ctrl_dev_info info;
	int err = iswi_ublk_control_open(&control, error);

	if (err != 0)
		return err;
	err = iswi_ublk_get_info(&control, dev_id, &info);
	if (err == 0)
		*info_out = (struct isw_ublk_info){
			.state = info.state,
			.queues = info.nr_hw_queues,
			.queue_depth = info.queue_depth,
			.request_bytes_max = info.max_io_buf_bytes,
			.server_pid = info.ublksrv_pid,
			.size_bytes = size_of(&control, dev_id),
			.identity = info.ublksrv_flags,
		};
	else
		explain_info(err, dev_id, error);
	iswi_ublk_control_close(&control);
	return err;
}

static int remove_device(struct iswi_ublk_control *control, uint32_t dev_id, uint64_t identity,
			 struct isw_error *error)
{
	struct ublksrv_ctrl_dev_info info;
	int err = iswi_ublk_get_info(control, dev_id, &info);

	if (err != 0)
		return explain_info(err, dev_id, error);
	if (info.ublksrv_flags != identity)
		return iswi_error(error, -ESTALE,
				  "ublk device %u is not this device's: somebody "
				  "else made it",
				  dev_id);
	if (info.state == UBLK_S_DEV_LIVE)
		return iswi_error(error, -EBUSY, "ublk device %u is served by process %d", dev_id,
				  info.ublksrv_pid);
	err = iswi_ublk_stop(control, dev_id);
	if (err == 0)
		err = iswi_ublk_del(control, dev_id);
	return err == 0 ? 0
			: iswi_error(error, err, "ublk device %u cannot be removed: %s", dev_id,
				     strerror(-err));
}

int isw_ublk_remove(uint32_t dev_id, uint64_t identity, struct isw_error *error)
{
	struct iswi_ublk_control control;
	int err = iswi_ublk_control_open(&control, error);

	if (err != 0)
		return err;
	err = remove_device(&control, dev_id, identity, error);
	iswi_ublk_control_close(&control);
	return err;
}
