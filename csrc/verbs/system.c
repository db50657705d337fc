/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The host's RDMA devices through libibverbs, which is loaded at run time. Of its header only types
 * and the inline functions that go through an object's own table are used, so nothing is linked.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "util/util.h"
#include "verbs/sysfs.h"
#include "verbs/verbs.h"

#define POLL_MAX 32u
#define POST_MAX 16u
/*
 * A packet that is not acknowledged is sent again after 4.096 us * 2^n, six times. Not seven: to
 * soft-RoCE that is for ever. n is such that it all ends with a request's deadline: sooner a host
 * that is merely busy would lose its connections. Within 67 ms to half a second.
 */
#define ACK_TIMEOUT_MIN 14
#define ACK_TIMEOUT_MAX 17
#define ACK_RETRIES     6
/* Nobody here sends what needs a receive, so it never happens; 7 would be for ever. */
#define RNR_RETRIES 3
#define RNR_TIMER   12
#define HOPS_MAX    64
/* From the first EIO on; a consumer waits for two seconds. */
#define GONE_MS 1000u

/* The header makes macros or inline calls of these: the library's own functions are meant. */
#undef ibv_query_port
#undef ibv_reg_mr

struct lib {
	struct ibv_device **(*get_device_list)(int *count);
	void (*free_device_list)(struct ibv_device **list);
	const char *(*get_device_name)(struct ibv_device *device);
	struct ibv_context *(*open_device)(struct ibv_device *device);
	int (*close_device)(struct ibv_context *context);
	int (*query_device)(struct ibv_context *context, struct ibv_device_attr *attr);
	int (*query_port)(struct ibv_context *context, uint8_t port,
			  struct _compat_ibv_port_attr *attr);
	struct ibv_pd *(*alloc_pd)(struct ibv_context *context);
	int (*dealloc_pd)(struct ibv_pd *pd);
	struct ibv_mr *(*reg_mr)(struct ibv_pd *pd, void *memory, size_t bytes, int access);
	int (*dereg_mr)(struct ibv_mr *mr);
	int (*rereg_mr)(struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *memory, size_t bytes,
			int access);
	struct ibv_comp_channel *(*create_comp_channel)(struct ibv_context *context);
	int (*destroy_comp_channel)(struct ibv_comp_channel *channel);
	struct ibv_cq *(*create_cq)(struct ibv_context *context, int entries, void *ctx,
				    struct ibv_comp_channel *channel, int vector);
	int (*destroy_cq)(struct ibv_cq *cq);
	int (*get_cq_event)(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **ctx);
	void (*ack_cq_events)(struct ibv_cq *cq, unsigned int count);
	struct ibv_qp *(*create_qp)(struct ibv_pd *pd, struct ibv_qp_init_attr *attr);
	int (*modify_qp)(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask);
	int (*destroy_qp)(struct ibv_qp *qp);
	const char *(*wc_status_str)(enum ibv_wc_status status);
};

struct iswi_vdev {
	struct lib lib;
	struct ibv_context *context;
	struct iswi_sysfs sysfs;
};

struct iswi_vpd {
	struct iswi_vdev *dev;
	struct ibv_pd *pd;
};

struct iswi_vmr {
	struct iswi_vdev *dev;
	struct ibv_mr *mr;
};

struct iswi_vcq {
	struct iswi_vdev *dev;
	struct ibv_comp_channel *channel; /* NULL: nobody waits */
	struct ibv_cq *cq;
};

struct iswi_vqp {
	struct iswi_vdev *dev;
	struct ibv_qp *qp;
};

/* ------------------------------------------------------------------------ library */

static int load(struct lib *lib, struct isw_error *error)
{
	const struct iswi_function wanted[] = {
		{"ibv_get_device_list", &lib->get_device_list},
		{"ibv_free_device_list", &lib->free_device_list},
		{"ibv_get_device_name", &lib->get_device_name},
		{"ibv_open_device", &lib->open_device},
		{"ibv_close_device", &lib->close_device},
		{"ibv_query_device", &lib->query_device},
		{"ibv_query_port", &lib->query_port},
		{"ibv_alloc_pd", &lib->alloc_pd},
		{"ibv_dealloc_pd", &lib->dealloc_pd},
		{"ibv_reg_mr", &lib->reg_mr},
		{"ibv_dereg_mr", &lib->dereg_mr},
		{"ibv_rereg_mr", &lib->rereg_mr},
		{"ibv_create_comp_channel", &lib->create_comp_channel},
		{"ibv_destroy_comp_channel", &lib->destroy_comp_channel},
		{"ibv_create_cq", &lib->create_cq},
		{"ibv_destroy_cq", &lib->destroy_cq},
		{"ibv_get_cq_event", &lib->get_cq_event},
		{"ibv_ack_cq_events", &lib->ack_cq_events},
		{"ibv_create_qp", &lib->create_qp},
		{"ibv_modify_qp", &lib->modify_qp},
		{"ibv_destroy_qp", &lib->destroy_qp},
		{"ibv_wc_status_str", &lib->wc_status_str},
	};

	return iswi_load_functions("libibverbs.so.1", "libibverbs1 ibverbs-providers", wanted,
				   ISWI_ARRAY_LEN(wanted), error);
}

static int no_devices(int code, struct isw_error *error)
{
	char name[ISW_RDMA_NAME_BYTES];

	if (!iswi_sysfs_device(name, sizeof(name)))
		return iswi_error(error, -ENODEV, "this host has no RDMA device");
	if (access("/sys/class/infiniband_verbs/abi_version", R_OK) != 0)
		return iswi_error(
			error, -ENOSYS,
			"the kernel's module ib_uverbs is not loaded: modprobe ib_uverbs");
	return iswi_error(error, -ENODEV,
			  "device %s is of no use to programs (%s): its provider is missing "
			  "(Debian: apt install ibverbs-providers) or /dev/infiniband is not ours",
			  name, strerror(code == 0 ? ENODEV : code));
}

static int list(struct lib *lib, struct ibv_device ***list_out, int *count_out,
		struct isw_error *error)
{
	char name[ISW_RDMA_NAME_BYTES];
	int code;

	if (!iswi_sysfs_device(name, sizeof(name)))
		return no_devices(0, error); /* whatever else is missing does not matter */
	code = load(lib, error);
	if (code != 0)
		return code;
	errno = 0;
	*list_out = lib->get_device_list(count_out);
	if (*list_out != NULL && *count_out > 0)
		return 0;
	code = errno;
	if (*list_out != NULL)
		lib->free_device_list(*list_out);
	return no_devices(code, error);
}

/* -------------------------------------------------------------------------- ports */

static void describe(struct lib *lib, struct ibv_context *context, const char *name,
		     const struct ibv_device_attr *device, uint32_t number,
		     struct isw_rdma_port *out)
{
	struct ibv_port_attr attr;

	memset(&attr, 0, sizeof(attr));
	memset(out, 0, sizeof(*out));
	snprintf(out->device, sizeof(out->device), "%s", name);
	out->port = number;
	out->qps_max = (uint32_t)device->max_qp;
	out->sends_max = (uint32_t)device->max_qp_wr;
	out->regions_max = (uint32_t)device->max_mr;
	out->reads_max = (uint32_t)ISWI_MAX(
		0, ISWI_MIN(device->max_qp_rd_atom, device->max_qp_init_rd_atom));
	out->region_bytes_max = device->max_mr_size;
	if (lib->query_port(context, (uint8_t)number, (struct _compat_ibv_port_attr *)&attr) != 0)
		return; /* shown as a port that is down */
	out->active = attr.state == IBV_PORT_ACTIVE;
	out->mtu_bytes = attr.active_mtu >= IBV_MTU_256 && attr.active_mtu <= IBV_MTU_4096
				 ? 128u << attr.active_mtu
				 : 0;
	out->lid = attr.lid;
	out->link = attr.link_layer == IBV_LINK_LAYER_ETHERNET ? ISW_RDMA_LINK_ETHERNET
							       : ISW_RDMA_LINK_INFINIBAND;
	iswi_sysfs_gids(out, (uint32_t)attr.gid_tbl_len);
}

static int system_ports(struct isw_rdma_port *ports_out, uint32_t max, struct isw_error *error)
{
	struct ibv_device **devices;
	int count, found = 0, code;
	struct isw_rdma_port scrap;
	struct lib lib;

	code = list(&lib, &devices, &count, error);
	if (code != 0)
		return code;
	for (int i = 0; i < count; i++) {
		struct ibv_context *context = lib.open_device(devices[i]);
		struct ibv_device_attr attr;

		if (context == NULL) {
			code = errno;
			continue;
		}
		if (lib.query_device(context, &attr) == 0)
			for (uint32_t n = 1; n <= attr.phys_port_cnt; n++, found++)
				describe(&lib, context, lib.get_device_name(devices[i]), &attr, n,
					 (uint32_t)found < max ? &ports_out[found] : &scrap);
		lib.close_device(context);
	}
	lib.free_device_list(devices);
	if (found == 0)
		return no_devices(code, error);
	return found;
}

/* ----------------------------------------------------------------- control objects */

static int system_open(const char *device, struct iswi_vdev **dev_out, struct isw_error *error)
{
	struct iswi_vdev *dev = calloc(1, sizeof(*dev));
	struct ibv_device **devices;
	int count, code;

	if (dev == NULL)
		return iswi_error(error, -ENOMEM, "no memory for RDMA device %s", device);
	code = list(&dev->lib, &devices, &count, error);
	if (code != 0) {
		free(dev);
		return code;
	}
	code = -ENODEV;
	for (int i = 0; i < count && dev->context == NULL; i++) {
		if (strcmp(dev->lib.get_device_name(devices[i]), device) != 0)
			continue;
		dev->context = dev->lib.open_device(devices[i]);
		code = dev->context != NULL ? 0 : -(errno != 0 ? errno : ENODEV);
	}
	dev->lib.free_device_list(devices);
	if (code != 0) {
		free(dev);
		return iswi_error(error, code, "RDMA device %s cannot be opened: %s", device,
				  strerror(-code));
	}
	iswi_sysfs_open(&dev->sysfs, ISWI_SYSFS_CLASS, dev->context->device->dev_name);
	*dev_out = dev;
	return 0;
}

static void system_close(struct iswi_vdev *dev)
{
	dev->lib.close_device(dev->context);
	iswi_sysfs_close(&dev->sysfs);
	free(dev);
}

static bool system_is_leaving(struct iswi_vdev *dev)
{
	return iswi_sysfs_is_leaving(&dev->sysfs);
}

/*
 * Where a driver can take its device from a program, the kernel ends everything when the host
 * removes the device, and answers EIO from then on, also before it has done so.
 */
static int ended(struct iswi_vdev *dev, int code)
{
	return code == EIO && iswi_sysfs_has_gone(&dev->sysfs, GONE_MS) ? 0 : -code;
}

static int failed(void)
{
	return errno != 0 ? -errno : -EIO;
}

static int system_pd_make(struct iswi_vdev *dev, struct iswi_vpd **pd_out)
{
	struct iswi_vpd *pd = calloc(1, sizeof(*pd));
	int code;

	if (pd == NULL)
		return -ENOMEM;
	pd->dev = dev;
	errno = 0;
	pd->pd = dev->lib.alloc_pd(dev->context);
	if (pd->pd == NULL) {
		code = failed();
		free(pd);
		return code;
	}
	*pd_out = pd;
	return 0;
}

static void system_pd_free(struct iswi_vpd *pd)
{
	pd->dev->lib.dealloc_pd(pd->pd);
	free(pd);
}

static int access_flags(unsigned int peer)
{
	int flags = IBV_ACCESS_LOCAL_WRITE;

	if ((peer & ISWI_VERBS_PEER_READS) != 0)
		flags |= IBV_ACCESS_REMOTE_READ;
	if ((peer & ISWI_VERBS_PEER_WRITES) != 0)
		flags |= IBV_ACCESS_REMOTE_WRITE;
	return flags;
}

static int system_mr_make(struct iswi_vpd *pd, void *memory, uint64_t bytes, unsigned int peer,
			  struct iswi_vmr **mr_out, struct iswi_verbs_key *key_out)
{
	struct iswi_vmr *mr = calloc(1, sizeof(*mr));
	int code;

	if (mr == NULL)
		return -ENOMEM;
	mr->dev = pd->dev;
	errno = 0;
	mr->mr = pd->dev->lib.reg_mr(pd->pd, memory, bytes, access_flags(peer));
	if (mr->mr == NULL) {
		code = failed();
		free(mr);
		return code;
	}
	*key_out = (struct iswi_verbs_key){.local = mr->mr->lkey, .remote = mr->mr->rkey};
	*mr_out = mr;
	return 0;
}

static int system_mr_free(struct iswi_vmr *mr)
{
	int code = ended(mr->dev, mr->dev->lib.dereg_mr(mr->mr));

	if (code != 0)
		return code;
	free(mr);
	return 0;
}

static int system_mr_move(struct iswi_vmr *mr, struct iswi_vpd *pd, unsigned int peer,
			  struct iswi_verbs_key *key_out)
{
	int what = IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS;
	int access = access_flags(peer), code = 0;

	errno = 0;
	if (pd->dev->lib.rereg_mr(mr->mr, what, pd->pd, NULL, 0, access) != 0)
		code = failed();
	if (code == -EOPNOTSUPP || code == -ENOSYS)
		code = iswi_verbs_rereg(mr->mr, pd->pd, access);
	if (code == 0)
		*key_out = (struct iswi_verbs_key){mr->mr->lkey, mr->mr->rkey};
	return code;
}

static void system_cq_free(struct iswi_vcq *cq)
{
	if (cq->cq != NULL)
		cq->dev->lib.destroy_cq(cq->cq);
	/* A queue that a removed device has kept keeps the channel. */
	if (cq->channel != NULL && cq->dev->lib.destroy_comp_channel(cq->channel) != 0)
		close(cq->channel->fd);
	free(cq);
}

static int system_cq_make(struct iswi_vdev *dev, uint32_t entries, struct iswi_vcq **cq_out,
			  int *fd_out)
{
	struct iswi_vcq *cq = calloc(1, sizeof(*cq));
	int code = 0;

	if (cq == NULL)
		return -ENOMEM;
	cq->dev = dev;
	errno = 0;
	if (fd_out != NULL) {
		cq->channel = dev->lib.create_comp_channel(dev->context);
		if (cq->channel == NULL || fcntl(cq->channel->fd, F_SETFL,
						 fcntl(cq->channel->fd, F_GETFL) | O_NONBLOCK) != 0)
			code = failed();
	}
	if (code == 0) {
		cq->cq = dev->lib.create_cq(dev->context, (int)entries, NULL, cq->channel, 0);
		if (cq->cq == NULL)
			code = failed();
	}
	if (code != 0) {
		system_cq_free(cq);
		return code;
	}
	if (fd_out != NULL)
		*fd_out = cq->channel->fd;
	*cq_out = cq;
	return 0;
}

static int system_qp_free(struct iswi_vqp *qp)
{
	int code = ended(qp->dev, qp->dev->lib.destroy_qp(qp->qp));

	if (code != 0)
		return code;
	free(qp);
	return 0;
}

static int system_qp_make(struct iswi_vpd *pd, struct iswi_vcq *cq,
			  const struct iswi_verbs_qp_config *config, struct iswi_vqp **qp_out,
			  uint32_t *number_out)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq->cq,
		.recv_cq = cq->cq,
		.qp_type = IBV_QPT_RC,
		.cap = {.max_send_wr = config->sends_max,
			.max_recv_wr = 1,
			.max_send_sge = 1,
			.max_recv_sge = 1},
	};
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.port_num = (uint8_t)config->port,
		.qp_access_flags =
			(unsigned int)(config->peer == 0 ? 0 : access_flags(config->peer)),
	};
	struct iswi_vqp *qp = calloc(1, sizeof(*qp));
	int code;

	if (qp == NULL)
		return -ENOMEM;
	qp->dev = pd->dev;
	errno = 0;
	qp->qp = pd->dev->lib.create_qp(pd->pd, &init);
	if (qp->qp == NULL) {
		code = failed();
		free(qp);
		return code;
	}
	code = qp->dev->lib.modify_qp(qp->qp, &attr,
				      IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
					      IBV_QP_ACCESS_FLAGS);
	if (code != 0) {
		system_qp_free(qp);
		return -code;
	}
	*number_out = qp->qp->qp_num;
	*qp_out = qp;
	return 0;
}

static enum ibv_mtu mtu_of(uint32_t bytes)
{
	enum ibv_mtu mtu = IBV_MTU_256;

	while (mtu < IBV_MTU_4096 && (128u << (mtu + 1)) <= bytes)
		mtu++;
	return mtu;
}

static uint8_t ack_timeout(uint32_t give_up_ms)
{
	uint8_t n = ACK_TIMEOUT_MIN;

	while (n < ACK_TIMEOUT_MAX &&
	       (4096ull << (n + 1)) * (ACK_RETRIES + 1) <= give_up_ms * 1000000ull)
		n++;
	return n;
}

static int system_qp_connect(struct iswi_vqp *qp, const struct iswi_verbs_path *path)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = mtu_of(path->mtu_bytes),
		.dest_qp_num = path->peer.number,
		.rq_psn = path->peer.psn,
		.max_dest_rd_atomic = (uint8_t)path->reads_max,
		.min_rnr_timer = RNR_TIMER,
		.ah_attr = {.is_global = path->peer.link == ISW_RDMA_LINK_ETHERNET,
			    .grh = {.sgid_index = (uint8_t)path->gid_index, .hop_limit = HOPS_MAX},
			    .dlid = (uint16_t)path->peer.lid,
			    .port_num = (uint8_t)path->port},
	};
	int code;

	memcpy(attr.ah_attr.grh.dgid.raw, path->peer.gid, sizeof(path->peer.gid));
	code = qp->dev->lib.modify_qp(qp->qp, &attr,
				      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
					      IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
					      IBV_QP_MIN_RNR_TIMER);
	if (code != 0)
		return -code;
	attr = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTS,
		.timeout = ack_timeout(path->give_up_ms),
		.retry_cnt = ACK_RETRIES,
		.rnr_retry = RNR_RETRIES,
		.sq_psn = path->psn,
		.max_rd_atomic = (uint8_t)path->reads_max,
	};
	return -qp->dev->lib.modify_qp(qp->qp, &attr,
				       IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
					       IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
					       IBV_QP_MAX_QP_RD_ATOMIC);
}

/* ----------------------------------------------------------------------- page path */

static int system_qp_fail(struct iswi_vqp *qp)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};

	return -qp->dev->lib.modify_qp(qp->qp, &attr, IBV_QP_STATE);
}

static int post_some(struct iswi_vqp *qp, const struct iswi_verbs_post *posts, uint32_t count,
		     uint32_t *posted_out)
{
	struct ibv_send_wr wr[POST_MAX], *bad = NULL;
	struct ibv_sge sge[POST_MAX];
	int code;

	for (uint32_t i = 0; i < count; i++) {
		sge[i] = (struct ibv_sge){.addr = (uintptr_t)posts[i].local,
					  .length = posts[i].length,
					  .lkey = posts[i].lkey};
		wr[i] = (struct ibv_send_wr){
			.wr_id = posts[i].id,
			.next = i + 1 < count ? &wr[i + 1] : NULL,
			.sg_list = &sge[i],
			.num_sge = 1,
			.opcode = posts[i].write ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ,
			.send_flags = posts[i].signalled ? IBV_SEND_SIGNALED : 0,
			.wr.rdma = {.remote_addr = posts[i].remote, .rkey = posts[i].rkey},
		};
	}
	code = ibv_post_send(qp->qp, wr, &bad);
	*posted_out = code == 0 || bad == NULL ? count : (uint32_t)(bad - wr);
	return -code;
}

static int system_post(struct iswi_vqp *qp, const struct iswi_verbs_post *posts, uint32_t *count)
{
	uint32_t wanted = *count, some;
	int code = 0;

	for (*count = 0; *count < wanted && code == 0; *count += some)
		code = post_some(qp, posts + *count, ISWI_MIN(wanted - *count, POST_MAX), &some);
	return code;
}

static int status_error(enum ibv_wc_status status)
{
	switch (status) {
	case IBV_WC_SUCCESS:
		return 0;
	case IBV_WC_RETRY_EXC_ERR:
	case IBV_WC_RNR_RETRY_EXC_ERR:
		return -ETIMEDOUT;
	case IBV_WC_REM_ACCESS_ERR:
	case IBV_WC_REM_INV_REQ_ERR:
		return -EACCES;
	case IBV_WC_WR_FLUSH_ERR:
		return -ECANCELED;
	default:
		return -EIO;
	}
}

static int system_poll(struct iswi_vcq *cq, struct iswi_verbs_done *done_out, uint32_t max)
{
	struct ibv_wc wc[POLL_MAX];
	int count = ibv_poll_cq(cq->cq, (int)ISWI_MIN(max, POLL_MAX), wc);

	if (count < 0)
		return -EIO;
	for (int i = 0; i < count; i++) {
		done_out[i].id = wc[i].wr_id;
		done_out[i].error = status_error(wc[i].status);
		done_out[i].text = wc[i].status == IBV_WC_SUCCESS
					   ? ""
					   : cq->dev->lib.wc_status_str(wc[i].status);
	}
	return count;
}

static int system_arm(struct iswi_vcq *cq)
{
	struct ibv_cq *from;
	unsigned int events = 0;
	void *ctx;

	while (cq->dev->lib.get_cq_event(cq->channel, &from, &ctx) == 0)
		events++;
	if (events > 0)
		cq->dev->lib.ack_cq_events(cq->cq, events);
	return -ibv_req_notify_cq(cq->cq, 0);
}

const struct iswi_verbs iswi_verbs_system = {
	.name = "libibverbs",
	.ports = system_ports,
	.open = system_open,
	.close = system_close,
	.is_leaving = system_is_leaving,
	.pd_make = system_pd_make,
	.pd_free = system_pd_free,
	.mr_make = system_mr_make,
	.mr_free = system_mr_free,
	.mr_move = system_mr_move,
	.cq_make = system_cq_make,
	.cq_free = system_cq_free,
	.qp_make = system_qp_make,
	.qp_connect = system_qp_connect,
	.qp_free = system_qp_free,
	.qp_fail = system_qp_fail,
	.post = system_post,
	.poll = system_poll,
	.arm = system_arm,
};
