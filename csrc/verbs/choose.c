/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which port leads to a peer. The kernel's routing says from which of our addresses packets to it
 * leave; the port is the one that has a RoCE v2 GID of that very address. Never an index by
 * position: the first entries are link-local, or of RoCE version 1, or of another network.
 */
#define _GNU_SOURCE 1
#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "util/util.h"
#include "verbs/verbs.h"

#define ANY_PORT  9 /* a UDP socket is connected to it, and nothing is sent */
#define MTU_MIN   256u
#define MTU_MAX   4096u
#define READS_MAX 16u /* enough to fill a link with pages; devices allow 16 to 128 */

/* An address of this host, as a GID. Many interfaces may have one link-local address. */
struct own {
	uint8_t gid[16];
	uint32_t scope; /* of a link-local one: the index of its interface; else 0 */
};

static void gid_of(const struct sockaddr_storage *address, struct own *out)
{
	const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)address;

	memset(out, 0, sizeof(*out));
	if (address->ss_family == AF_INET6) {
		memcpy(out->gid, &in6->sin6_addr, 16);
		if (IN6_IS_ADDR_LINKLOCAL(&in6->sin6_addr))
			out->scope = in6->sin6_scope_id;
		return;
	}
	memset(out->gid + 10, 0xff, 2);
	memcpy(out->gid + 12, &((const struct sockaddr_in *)address)->sin_addr, 4);
}

static bool is_mapped(const uint8_t *gid)
{
	static const uint8_t prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

	return memcmp(gid, prefix, sizeof(prefix)) == 0;
}

static void address_of(const uint8_t *gid, uint32_t scope, struct sockaddr_storage *address_out,
		       socklen_t *bytes_out)
{
	memset(address_out, 0, sizeof(*address_out));
	if (is_mapped(gid)) {
		struct sockaddr_in *in = (struct sockaddr_in *)address_out;

		in->sin_family = AF_INET;
		in->sin_port = htons(ANY_PORT);
		memcpy(&in->sin_addr, gid + 12, 4);
		*bytes_out = sizeof(*in);
	} else {
		struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)address_out;

		in6->sin6_family = AF_INET6;
		in6->sin6_port = htons(ANY_PORT);
		memcpy(&in6->sin6_addr, gid, 16);
		in6->sin6_scope_id = IN6_IS_ADDR_LINKLOCAL(&in6->sin6_addr) ? scope : 0;
		*bytes_out = sizeof(*in6);
	}
}

static void gid_text(const uint8_t *gid, char *out)
{
	if (is_mapped(gid))
		inet_ntop(AF_INET, gid + 12, out, INET6_ADDRSTRLEN);
	else
		inet_ntop(AF_INET6, gid, out, INET6_ADDRSTRLEN);
}

/* Our address on the way to another one. */
static int route(const struct sockaddr *to, socklen_t to_bytes, struct own *out)
{
	struct sockaddr_storage from;
	socklen_t from_bytes = sizeof(from);
	int fd = socket(to->sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0), code = 0;

	if (fd < 0)
		return -errno;
	if (connect(fd, to, to_bytes) != 0 ||
	    getsockname(fd, (struct sockaddr *)&from, &from_bytes) != 0)
		code = -errno;
	else
		gid_of(&from, out);
	close(fd);
	return code;
}

static int route_to_host(const char *host, struct own *out, struct isw_error *error)
{
	const struct addrinfo hints = {.ai_socktype = SOCK_DGRAM};
	struct addrinfo *found;
	int code = getaddrinfo(host, "9", &hints, &found);

	if (code != 0)
		return iswi_error(error, -ENXIO, "%s cannot be resolved: %s", host,
				  gai_strerror(code));
	code = -ENXIO;
	for (const struct addrinfo *one = found; one != NULL && code != 0; one = one->ai_next)
		code = route(one->ai_addr, one->ai_addrlen, out);
	freeaddrinfo(found);
	if (code != 0)
		return iswi_error(error, code, "there is no way to %s: %s", host, strerror(-code));
	return 0;
}

/* ------------------------------------------------------------------------ choosing */

static bool is_of(const struct isw_rdma_gid *gid, const struct own *address)
{
	return memcmp(gid->raw, address->gid, 16) == 0 &&
	       (address->scope == 0 || gid->scope == 0 || gid->scope == address->scope);
}

static const struct isw_rdma_gid *find_gid(const struct isw_rdma_port *port,
					   const struct own *address, uint32_t type)
{
	for (uint32_t i = 0; i < port->gids; i++)
		if (port->gid[i].type == type && is_of(&port->gid[i], address))
			return &port->gid[i];
	return NULL;
}

static void take(const struct isw_rdma_port *port, const struct isw_rdma_gid *gid,
		 struct iswi_verbs_choice *out)
{
	memset(out, 0, sizeof(*out));
	memcpy(out->device, port->device, sizeof(out->device));
	out->port = port->port;
	out->end.link = port->link;
	out->end.lid = port->lid;
	out->end.mtu_bytes = ISWI_MIN(port->mtu_bytes, MTU_MAX);
	out->end.reads_max = ISWI_MIN(port->reads_max, READS_MAX);
	if (gid != NULL) {
		out->gid_index = gid->index;
		memcpy(out->end.gid, gid->raw, sizeof(gid->raw));
	}
}

static int refuse(const struct isw_rdma_port *ports, uint32_t count, const struct own *address,
		  struct isw_error *error)
{
	const struct isw_rdma_port *old = NULL;
	char text[INET6_ADDRSTRLEN];
	bool active = false;

	gid_text(address->gid, text);
	for (uint32_t i = 0; i < count; i++) {
		if (find_gid(&ports[i], address, ISW_RDMA_GID_OTHER) != NULL)
			old = &ports[i];
		active = active || ports[i].active;
	}
	if (!active)
		return iswi_error(error, -ENETDOWN,
				  "port %u of RDMA device %s is down, and no other one is up (ip "
				  "link set INTERFACE up)",
				  ports[0].port, ports[0].device);
	if (old != NULL)
		return iswi_error(
			error, -EADDRNOTAVAIL,
			"RDMA device %s has %s only as a GID of RoCE version 1; version 2 "
			"is needed",
			old->device, text);
	return iswi_error(error, -EADDRNOTAVAIL,
			  "no RDMA device has a RoCE v2 GID of %s, the address from which the "
			  "other end is reached",
			  text);
}

static int choose(const struct iswi_verbs *verbs, const struct own *address, bool any_infiniband,
		  struct iswi_verbs_choice *choice_out, struct isw_error *error)
{
	struct isw_rdma_port *ports = calloc(ISWI_VERBS_PORTS_MAX, sizeof(*ports));
	const struct isw_rdma_port *down = NULL;
	uint32_t count;
	int code;

	if (ports == NULL)
		return iswi_error(error, -ENOMEM, "no memory to look at RDMA devices");
	code = verbs->ports(ports, ISWI_VERBS_PORTS_MAX, error);
	if (code <= 0)
		goto out;
	count = ISWI_MIN((uint32_t)code, ISWI_VERBS_PORTS_MAX);
	for (uint32_t i = 0; i < count && address != NULL; i++) {
		const struct isw_rdma_gid *gid = find_gid(&ports[i], address, ISW_RDMA_GID_ROCE_V2);

		if (gid == NULL || ports[i].link != ISW_RDMA_LINK_ETHERNET)
			continue;
		if (!ports[i].active) {
			down = &ports[i];
			continue;
		}
		take(&ports[i], gid, choice_out);
		code = 0;
		goto out;
	}
	/* An InfiniBand port has no address; its fabric either has the peer or does not. */
	for (uint32_t i = 0; i < count && any_infiniband; i++)
		if (ports[i].link == ISW_RDMA_LINK_INFINIBAND && ports[i].active &&
		    ports[i].lid != 0) {
			take(&ports[i], NULL, choice_out);
			code = 0;
			goto out;
		}
	if (down != NULL)
		code = iswi_error(error, -ENETDOWN,
				  "port %u of RDMA device %s, which leads to the other end, is "
				  "down (ip link set INTERFACE up)",
				  down->port, down->device);
	else if (address != NULL)
		code = refuse(ports, count, address, error);
	else
		code = iswi_error(error, -ENETDOWN, "this host has no active InfiniBand port");
out:
	free(ports);
	if (code == 0 && choice_out->device[0] == '\0')
		code = iswi_error(error, -ENODEV, "this host has no RDMA device");
	return code;
}

int iswi_verbs_choose(const struct iswi_verbs *verbs, const char *host,
		      struct iswi_verbs_choice *choice_out, struct isw_error *error)
{
	struct own address;
	int code = route_to_host(host, &address, error);

	memset(choice_out, 0, sizeof(*choice_out));
	return code != 0 ? code : choose(verbs, &address, true, choice_out, error);
}

int iswi_verbs_choose_for(const struct iswi_verbs *verbs, const struct isw_rdma_end *peer,
			  struct iswi_verbs_choice *choice_out, struct isw_error *error)
{
	struct sockaddr_storage to;
	struct own address;
	char text[INET6_ADDRSTRLEN];
	socklen_t bytes;
	int code;

	memset(choice_out, 0, sizeof(*choice_out));
	if (peer->link == ISW_RDMA_LINK_INFINIBAND)
		return choose(verbs, NULL, true, choice_out, error);
	address_of(peer->gid, peer->scope, &to, &bytes);
	code = route((struct sockaddr *)&to, bytes, &address);
	if (code != 0) {
		gid_text(peer->gid, text);
		return iswi_error(error, code, "there is no way to %s: %s", text, strerror(-code));
	}
	return choose(verbs, &address, false, choice_out, error);
}

/* Of RoCE: ff... (as in IPv6), or ::ffff: and an IPv4 address from 224.0.0.0 on. */
static bool is_many(const uint8_t gid[16])
{
	static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};

	return gid[0] == 0xff || (memcmp(gid, mapped, sizeof(mapped)) == 0 && gid[12] >= 224);
}

int iswi_verbs_meet(const struct iswi_verbs_choice *ours, uint32_t psn,
		    const struct isw_rdma_end *peer, struct iswi_verbs_path *path_out,
		    struct isw_error *error)
{
	if (peer->link != ours->end.link)
		return iswi_error(error, -EINVAL,
				  "one end is on InfiniBand and the other on Ethernet");
	if (peer->number >> 24 != 0 || peer->psn >> 24 != 0 || peer->mtu_bytes < MTU_MIN ||
	    peer->reads_max == 0 || is_many(peer->gid) ||
	    (peer->link == ISW_RDMA_LINK_INFINIBAND && (peer->lid == 0 || peer->lid > UINT16_MAX)))
		return iswi_error(error, -EINVAL,
				  "what the other end says of its RDMA connection cannot be");
	*path_out = (struct iswi_verbs_path){
		.port = ours->port,
		.gid_index = ours->gid_index,
		.psn = psn,
		.mtu_bytes = ISWI_MIN(ours->end.mtu_bytes, peer->mtu_bytes),
		.reads_max = ISWI_MIN(ours->end.reads_max, peer->reads_max),
		.peer = *peer,
	};
	return 0;
}

int iswi_verbs_psn(uint32_t *psn_out)
{
	uint32_t number;

	if (getrandom(&number, sizeof(number), 0) != (ssize_t)sizeof(number))
		return -EIO;
	*psn_out = number & 0xffffff;
	return 0;
}

int isw_rdma_ports(struct isw_rdma_port *ports_out, uint32_t max, struct isw_error *error)
{
	return iswi_verbs_system.ports(ports_out, max, error);
}

int isw_rdma_choose(const char *host, struct isw_rdma_port *port_out, struct isw_rdma_gid *gid_out,
		    struct isw_error *error)
{
	struct isw_rdma_port ports[ISWI_VERBS_PORTS_MAX];
	struct iswi_verbs_choice choice;
	int count, code = iswi_verbs_choose(&iswi_verbs_system, host, &choice, error);

	if (code != 0)
		return code;
	count = isw_rdma_ports(ports, ISWI_VERBS_PORTS_MAX, error);
	for (int i = 0; i < count && i < (int)ISWI_VERBS_PORTS_MAX; i++) {
		if (strcmp(ports[i].device, choice.device) != 0 || ports[i].port != choice.port)
			continue;
		*port_out = ports[i];
		memset(gid_out, 0, sizeof(*gid_out));
		memcpy(gid_out->raw, choice.end.gid, sizeof(gid_out->raw));
		gid_out->index = choice.gid_index;
		gid_out->type = choice.end.link == ISW_RDMA_LINK_ETHERNET ? ISW_RDMA_GID_ROCE_V2
									  : ISW_RDMA_GID_OTHER;
		return 0;
	}
	return iswi_error(error, -ENODEV, "RDMA device %s has just gone", choice.device);
}
