// What exchange.cc takes for granted of NCCL, compared with NCCL's own header.
#include <cstddef>
#include <type_traits>

#include <nccl.h>

using std::size_t;

template <typename Function, Function* function, typename... Arguments>
constexpr bool takes = std::is_same_v<Function, ncclResult_t(Arguments...)>;

static_assert(sizeof(ncclResult_t) == sizeof(int) && ncclSuccess == 0);
static_assert(sizeof(ncclDataType_t) == sizeof(int) && ncclInt8 == 0);
static_assert(sizeof(ncclUniqueId) == 128 && NCCL_UNIQUE_ID_BYTES == 128);
static_assert(std::is_pointer_v<ncclComm_t> && std::is_pointer_v<cudaStream_t>);
static_assert(takes<decltype(ncclGetUniqueId), ncclGetUniqueId, ncclUniqueId*>);
static_assert(takes<decltype(ncclCommInitRank), ncclCommInitRank, ncclComm_t*, int, ncclUniqueId, int>);
static_assert(takes<decltype(ncclGroupStart), ncclGroupStart>);
static_assert(takes<decltype(ncclGroupEnd), ncclGroupEnd>);
static_assert(takes<decltype(ncclSend), ncclSend, const void*, size_t, ncclDataType_t, int,
                    ncclComm_t, cudaStream_t>);
static_assert(takes<decltype(ncclRecv), ncclRecv, void*, size_t, ncclDataType_t, int, ncclComm_t,
                    cudaStream_t>);
static_assert(takes<decltype(ncclCommGetAsyncError), ncclCommGetAsyncError, ncclComm_t,
                    ncclResult_t*>);
static_assert(std::is_same_v<decltype(ncclGetErrorString), const char*(ncclResult_t)>);
